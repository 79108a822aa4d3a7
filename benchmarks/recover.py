"""Recovery: from `kill -9` of a rank to the next finished step of `pretrain train`, the smallest model.

The time holds everything that a fault costs besides the steps since the last checkpoint: noticing,
ending the other rank, starting both, reading the checkpoint, the first step. The wait for a second
checkpoint after each fault keeps the faults apart.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

from benchmarks.result import Result, median
from benchmarks.tiny_run import TinyRun, prepare, training


def _kill_once(run: TinyRun, attempt: int) -> float:
    """Kills a rank of the attempt and gives the seconds until the next attempt's first finished step."""
    run.wait_for(
        f"checkpoint of attempt {attempt}",
        lambda: [event for event in run.events("committed") if event.fields["attempt"] == attempt],
    )
    (started,) = [event for event in run.events("ranks_started") if event.fields["attempt"] == attempt]
    victim = started.fields["processes"][-1]["pid"]
    killed = time.time()
    os.kill(victim, signal.SIGKILL)
    steps = run.wait_for(f"step of attempt {attempt + 1}", lambda: run.steps(attempt + 1))
    return float(steps[0]["t"] - killed)


def measure(*, quick: bool, command: str) -> list[Result]:
    """Median seconds over several faults of one run."""
    faults = 2 if quick else 7
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        with training(
            folder,
            "schedule.total_steps=1e6",
            "checkpoint.every_steps=20",
            "metrics.log_every_steps=1",
            "data.prefetch_steps=4",
        ) as run:
            times = [_kill_once(run, attempt) for attempt in range(1, faults + 1)]
    return [Result("recover.kill_to_step_s", median(times), "s", "", None, faults, command)]
