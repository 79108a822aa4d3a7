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


def _chaos(trials: int) -> dict[str, Any]:
    """The summary of so many seeded trials on rank processes, as far as the time allows."""
    words = ["--trials", str(trials), "--cluster", "0", "--limit-s", str(CHAOS_LIMIT_S)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if not done.stdout.strip():
        raise RuntimeError(f"the campaign ended with {done.returncode}: {done.stderr[-2000:]}")
    summary: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return summary


def measure(*, quick: bool, command: str) -> list[Result]:
    """Medians over several faults of a run with standbys and of one without; hangs; a short chaos campaign."""
    warm_faults, cold_faults, hangs, trials = (2, 1, 1, 4) if quick else (5, 2, 2, 40)
    compiled_faults = 1 if quick else 3
    cold: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        with training(folder, *SETTINGS, "cluster.standbys=true") as run:
            warm = [_fault_once(run, n, signal.SIGKILL, standbys=True) for n in range(1, warm_faults + 1)]
            stopped = [
                _fault_once(run, n, signal.SIGSTOP, standbys=True)
                for n in range(warm_faults + 1, warm_faults + hangs + 1)
            ]
        with training(folder, *SETTINGS, "cluster.standbys=false") as run:  # not beside: they would fight for the cores
            cold = [_fault_once(run, n, signal.SIGKILL, standbys=False) for n in range(1, cold_faults + 1)]
        with training(folder, *SETTINGS, "cluster.standbys=true", "model.kernels=compiled") as run:
            compiled = [_fault_once(run, n, signal.SIGKILL, standbys=True) for n in range(1, compiled_faults + 1)]
    chaos = _chaos(trials)

    def middle(faults: list[dict[str, float]], phase: str) -> float:
        return median([fault[phase] for fault in faults])

    kills = [
        Result(f"recover.{phase}", middle(warm, phase), "s", "without standbys, s", middle(cold, phase), warm_faults,
               command)
        for phase in warm[0] if phase != "allowed_s"
    ]  # fmt: skip
    rest = [
        ("kill_to_step_compiled_s", middle(compiled, TOTAL), "s", "eager, s", middle(warm, TOTAL), compiled_faults),
        ("hang_to_step_s", middle(stopped, TOTAL), "s", "kill to step, s", middle(warm, TOTAL), hangs),
        ("hang_seen_s", middle(stopped, "seen_s"), "s", "3 x step time + 2, s", middle(stopped, "allowed_s"), hangs),
        ("chaos_trials", float(chaos["trials"]), "fired", "tried", float(chaos["tried"]), 1),
        ("chaos_equal_fraction", chaos["equal"] / max(1, chaos["trials"]), "", "all", 1.0, chaos["trials"]),
    ]
    return [*kills, *(Result(f"recover.{name}", *values, command) for name, *values in rest)]
