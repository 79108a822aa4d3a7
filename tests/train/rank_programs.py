"""Whole runs of `python -m pretrain` inside rank processes that are already up: several per start."""

from __future__ import annotations

import os

from pretrain.__main__ import main
from pretrain.topology import World
from pretrain.train.watch import Heartbeat


def trainings(world: World, runs: list[list[str]], home: str) -> list[int]:
    """Trains one run after the other in the process group that is up; exit codes."""
    os.environ["PRETRAIN_HOME"] = home
    return [int(main(arguments)) for arguments in runs]


def compiling_steps(world: World, runs: list[list[str]], home: str) -> dict[str, list[int]]:
    """As `trainings`, with the steps that were told as ones that may compile."""
    told: list[int] = []
    original = Heartbeat.phase

    def phase(self: Heartbeat, name: str, step: int, *, collective: bool = False, own_s: float | None = None) -> None:
        original(self, name, step, collective=collective, own_s=own_s)
        if name == "compile":
            told.append(step)

    Heartbeat.phase = phase  # type: ignore[method-assign]
    try:
        return {"codes": trainings(world, runs, home), "compiling": told}
    finally:
        Heartbeat.phase = original  # type: ignore[method-assign]
