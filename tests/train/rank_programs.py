"""Whole runs of `python -m pretrain` inside rank processes that are already up: several per start."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from torch import nn

from pretrain.__main__ import main
from pretrain.generate.decode import Begun
from pretrain.topology import World
from pretrain.train import model_copy
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


def slow_translations(
    world: World, run: list[str], home: str, copy_s: float, token_s: float, slow_step: int
) -> dict[str, object]:
    """Trains with copies of the model that take long, and texts that do at a step.

    Gives the exit code, and in their order the beats (time, "beat", phase, step, collective), tokens (time, "feed") and
    copies of the model (time, "copy", phase).
    """
    events: list[tuple[object, ...]] = []
    phase, load, feed = Heartbeat.phase, model_copy.load_weights, Begun.feed

    def told(self: Heartbeat, name: str, step: int, **rest: Any) -> None:
        phase(self, name, step, **rest)
        events.append((time.time(), "beat", name, step, self.collective))

    def last_beat() -> tuple[object, ...]:
        return next(event for event in reversed(events) if event[1] == "beat")

    def slow_load(*given: Any, **named: Any) -> nn.Module:
        events.append((time.time(), "copy", last_beat()[2]))
        time.sleep(copy_s)
        return load(*given, **named)

    def slow_feed(self: Begun, ids: Sequence[int]) -> None:
        feed(self, ids)
        events.append((time.time(), "feed"))
        time.sleep(token_s if last_beat()[3] == slow_step else 0.0)

    with (
        patch.object(Heartbeat, "phase", told),
        patch.object(model_copy, "load_weights", slow_load),
        patch.object(Begun, "feed", slow_feed),
    ):
        return {"code": trainings(world, [run], home)[0], "events": events}
