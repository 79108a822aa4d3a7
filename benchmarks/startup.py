"""Start: from typing `pretrain train` to the first finished step of the smallest model, by phase.

Phases: `ready` is config, run directory and the local Ray; `ranks` the start of the rank processes;
`first_step` their imports, process group, model, DeepSpeed and one step.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.result import Result, median
from benchmarks.tiny_run import prepare, training


def _start_once(folder: Path) -> dict[str, float]:
    with training(folder, "schedule.total_steps=1e6", "checkpoint.every_steps=1000000") as run:
        (first, *_) = run.wait_for("first step", lambda: run.steps(1))
        (attempt,) = run.events("attempt_started")
        (ranks,) = run.events("ranks_started")
        return {
            "startup.train_to_first_step_s": first["t"] - run.started,
            "startup.ready_s": attempt.t - run.started,
            "startup.ranks_s": ranks.t - attempt.t,
            "startup.first_step_s": first["t"] - ranks.t,
        }


def measure(*, quick: bool, command: str) -> list[Result]:
    """Medians of several starts."""
    repetitions = 2 if quick else 5
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        starts = [_start_once(folder) for _ in range(repetitions)]
    return [
        Result(metric, median([start[metric] for start in starts]), "s", "", None, repetitions, command)
        for metric in starts[0]
    ]
