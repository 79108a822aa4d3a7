"""Recovery: from a fault to the next finished step of `pretrain train`, the smallest model, by phase; and chaos.

The time holds everything that a fault costs besides the steps since the last copy in memory: noticing,
ending the other rank, starting both, reading the copy, the first step. The baseline is the same run
without standbys. The wait for a second checkpoint, and for the standbys, after each fault keeps the
faults apart. Phases: `seen` until the controller knows, `gone` until no rank of the attempt lives,
`placed` until the next one is ordered, `ranks` until its processes are known; then the stages of rank 0.
A hang is a SIGSTOP; its baseline is what it may take: three of the longest last steps and two seconds. Compiled
kernels are measured apart: their first attempt has filled the compiler's cache.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.result import Result, median
from benchmarks.tiny_run import ROOT, TinyRun, prepare, training

TOTAL = "kill_to_step_s"
SETTINGS = (
    "schedule.total_steps=1e6",
    "checkpoint.every_steps=20",
    "checkpoint.ram_every_steps=2",
    "metrics.log_every_steps=1",
    "data.prefetch_steps=4",
)
CHAOS_LIMIT_S = 75
WAIT_S = 240.0  # for anything, on a machine that others use as well


def _of(run: TinyRun, kind: str, attempt: int) -> Any:
    """The first event of a kind in an attempt, or None."""
    return next((event for event in run.events(kind) if event.fields["attempt"] == attempt), None)


def _fault_once(run: TinyRun, attempt: int, number: int, *, standbys: bool) -> dict[str, float]:
    """Sends a signal to a rank of the attempt; seconds until the next attempt's first finished step, by phase."""
    run.wait_for(f"checkpoint of attempt {attempt}", lambda: _of(run, "committed", attempt), WAIT_S)
    if standbys:
        run.wait_for(f"standbys of attempt {attempt}", lambda: _of(run, "standbys_ready", attempt), WAIT_S)
    started = run.wait_for(f"ranks of attempt {attempt}", lambda: _of(run, "ranks_started", attempt), WAIT_S)
    last = [record["t"] for record in run.steps(attempt)[-33:]]
    hurt = time.time()
    os.kill(started.fields["processes"][-1]["pid"], number)
    steps = run.wait_for(f"step of attempt {attempt + 1}", lambda: run.steps(attempt + 1), WAIT_S)
    trained = run.wait_for("stages of the start", lambda: _of(run, "training", attempt + 1), WAIT_S)
    marks = [
        ("seen_s", _of(run, "fault", attempt).t),
        ("gone_s", _of(run, "attempt_ended", attempt).t),
        ("placed_s", _of(run, "attempt_started", attempt + 1).t),
        ("ranks_s", _of(run, "ranks_started", attempt + 1).t),
    ]
    times = [hurt, *(t for _, t in marks)]
    phases = {name: after - before for (name, _), before, after in zip(marks, times, times[1:], strict=False)}
    longest = max(later - earlier for earlier, later in itertools.pairwise(last))
    return {TOTAL: steps[0]["t"] - hurt, **phases, **trained.fields["stages"], "allowed_s": 3 * longest + 2}


def _middle(faults: list[dict[str, float]], phase: str) -> float:
    return median([fault[phase] for fault in faults])


def _kill(folder: Path, quick: bool, command: str) -> list[Result]:
    """Kills of a run with standbys, and of one without."""
    warm_faults, cold_faults = (2, 1) if quick else (5, 2)
    with training(folder, *SETTINGS, "cluster.standbys=true") as run:
        warm = [_fault_once(run, n, signal.SIGKILL, standbys=True) for n in range(1, warm_faults + 1)]
    with training(folder, *SETTINGS, "cluster.standbys=false") as run:  # not beside: they would fight for the cores
        cold = [_fault_once(run, n, signal.SIGKILL, standbys=False) for n in range(1, cold_faults + 1)]
    return [
        Result(f"recover.{phase}", _middle(warm, phase), "s", "without standbys, s", _middle(cold, phase), warm_faults,
               command)
        for phase in warm[0] if phase != "allowed_s"
    ]  # fmt: skip


def _hang(folder: Path, quick: bool, command: str) -> list[Result]:
    """Stopped ranks of a run with standbys."""
    count = 2 if quick else 7
    with training(folder, *SETTINGS, "cluster.standbys=true") as run:
        hangs = [_fault_once(run, n, signal.SIGSTOP, standbys=True) for n in range(1, count + 1)]
    latest = max(hangs, key=lambda hang: hang["seen_s"] - hang["allowed_s"])
    return [
        Result(f"recover.{name}", seen, "s", "3 x step time + 2, s", allowed, count, command)
        for name, seen, allowed in (
            ("hang_seen_s", _middle(hangs, "seen_s"), _middle(hangs, "allowed_s")),
            ("hang_seen_latest_s", latest["seen_s"], latest["allowed_s"]),
        )
    ] + [Result("recover.hang_to_step_s", _middle(hangs, TOTAL), "s", "", None, count, command)]


def _compiled(folder: Path, quick: bool, command: str) -> list[Result]:
    """Kills of a run with compiled kernels; its first attempt has filled the compiler's cache."""
    count = 1 if quick else 3
    with training(folder, *SETTINGS, "cluster.standbys=true", "model.kernels=compiled") as run:
        faults = [_fault_once(run, n, signal.SIGKILL, standbys=True) for n in range(1, count + 1)]
    return [Result("recover.kill_to_step_compiled_s", _middle(faults, TOTAL), "s", "", None, count, command)]


def _nodes(folder: Path, quick: bool, command: str) -> list[Result]:
    """A host of three that loses power, and one whose link is cut: the two that are left go on from memory."""
    from tests.cluster.measure import lose_hosts  # needs root: hosts are network namespaces

    count = 1 if quick else 2
    losses = [lose_hosts(folder / f"hosts-{number}") for number in range(count)]
    return [
        Result(f"recover.{name}_to_step_s", median([loss[name] for loss in losses]), "s", "", None, count, command)
        for name in ("node_loss", "partition")
    ]


def _chaos(folder: Path, quick: bool, command: str) -> list[Result]:
    """A short campaign of seeded trials on rank processes, as far as the time allows."""
    words = ["--trials", "4" if quick else "40", "--cluster", "0", "--limit-s", str(CHAOS_LIMIT_S)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if not done.stdout.strip():
        raise RuntimeError(f"the campaign ended with {done.returncode}: {done.stderr[-2000:]}")
    chaos: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    equal = chaos["equal"] / max(1, chaos["trials"])
    return [
        Result("recover.chaos_trials", float(chaos["trials"]), "fired", "tried", float(chaos["tried"]), 1, command),
        Result("recover.chaos_equal_fraction", equal, "", "all", 1.0, chaos["trials"], command),
    ]


PARTS = {"kill": _kill, "hang": _hang, "compiled": _compiled, "nodes": _nodes, "chaos": _chaos}


def measure_part(part: str, *, quick: bool, command: str) -> list[Result]:
    """Medians over several faults of one kind."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        return PARTS[part](folder, quick, command)


def measure(*, quick: bool, command: str) -> list[Result]:
    """All parts, one after the other."""
    return [result for part in PARTS for result in measure_part(part, quick=quick, command=command)]
