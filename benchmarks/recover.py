"""Recovery: from `kill -9` of a rank to the next finished step of `pretrain train`, the smallest model, by phase.

The time holds everything that a fault costs besides the steps since the last checkpoint: noticing,
ending the other rank, starting both, reading the checkpoint, the first step. The baseline is the same
run without standbys. The wait for a second checkpoint, and for the standbys, after each fault keeps the
faults apart. Phases: `seen` until the controller knows, `gone` until no rank of the attempt lives,
`placed` until the next one is ordered, `ranks` until its processes are known; then the stages of rank 0.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.result import Result, median
from benchmarks.tiny_run import TinyRun, prepare, training

TOTAL = "kill_to_step_s"
SETTINGS = (
    "schedule.total_steps=1e6",
    "checkpoint.every_steps=20",
    "metrics.log_every_steps=1",
    "data.prefetch_steps=4",
)


def _of(run: TinyRun, kind: str, attempt: int) -> Any:
    """The first event of a kind in an attempt, or None."""
    return next((event for event in run.events(kind) if event.fields["attempt"] == attempt), None)


def _kill_once(run: TinyRun, attempt: int, *, standbys: bool) -> dict[str, float]:
    """Kills a rank of the attempt; seconds until the next attempt's first finished step, in all and by phase."""
    run.wait_for(f"checkpoint of attempt {attempt}", lambda: _of(run, "committed", attempt))
    if standbys:
        run.wait_for(f"standbys of attempt {attempt}", lambda: _of(run, "standbys_ready", attempt))
    started = run.wait_for(f"ranks of attempt {attempt}", lambda: _of(run, "ranks_started", attempt))
    killed = time.time()
    os.kill(started.fields["processes"][-1]["pid"], signal.SIGKILL)
    steps = run.wait_for(f"step of attempt {attempt + 1}", lambda: run.steps(attempt + 1))
    trained = run.wait_for("stages of the start", lambda: _of(run, "training", attempt + 1))
    marks = [
        ("seen_s", _of(run, "fault", attempt).t),
        ("gone_s", _of(run, "attempt_ended", attempt).t),
        ("placed_s", _of(run, "attempt_started", attempt + 1).t),
        ("ranks_s", _of(run, "ranks_started", attempt + 1).t),
    ]
    times = [killed, *(t for _, t in marks)]
    phases = {name: after - before for (name, _), before, after in zip(marks, times, times[1:], strict=False)}
    return {TOTAL: steps[0]["t"] - killed, **phases, **trained.fields["stages"]}


def measure(*, quick: bool, command: str) -> list[Result]:
    """Medians over several faults of a run with standbys and of one without."""
    faults = 2 if quick else 7
    sides: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for standbys, times in sides.items():  # one after the other: two runs would fight for the cores
            with training(folder, *SETTINGS, f"cluster.standbys={str(standbys).lower()}") as run:
                times += [_kill_once(run, attempt, standbys=standbys) for attempt in range(1, faults + 1)]
    warm, cold = sides[True], sides[False]
    return [
        Result(
            f"recover.{phase}",
            median([fault[phase] for fault in warm]),
            "s",
            "without standbys, s",
            median([fault[phase] for fault in cold]),
            faults,
            command,
        )
        for phase in warm[0]
    ]
