"""Rank programs of test_saving: a Saver over stores that fail when told to."""

from __future__ import annotations

import io
import itertools
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from pretrain.checkpoint import MemoryTier, list_checkpoints
from pretrain.config.schema import CheckpointConfig
from pretrain.data.loader import StepData
from pretrain.data.state import DataState
from pretrain.engine.distributed import barrier
from pretrain.errors import PretrainError, StoreError
from pretrain.log import Log
from pretrain.rundir.memory_folders import MemoryOwner
from pretrain.store import open_store
from pretrain.store.local import LocalStore
from pretrain.topology import World
from pretrain.train.agreement import agree
from pretrain.train.memory import MemorySaver
from pretrain.train.saving import Saver
from pretrain.train.state import TrainingState
from pretrain.train.stop import StopReason
from tests.checkpoint.ranks_checkpoint import nothing
from tests.engine.small import make_engine, run_config


class Failing(LocalStore):
    """Has no space for big files as long as `left` says so."""

    left = 0

    def put_stream(self, key: str, chunks: Any) -> int:
        if key.endswith(".safetensors") and Failing.left:
            Failing.left -= 1
            raise StoreError(f"cannot write {key}: No space left on device.")
        return super().put_stream(key, chunks)

    def child(self, prefix: str) -> Failing:
        return Failing(f"{self.url}/{prefix}")


class Told:
    """Keeps the events, and the phases that the heartbeat would tell; `+` where other ranks are waited for."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any, str]] = []
        self.phases: list[str] = []

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields.get("step"), fields.get("message", "")))

    def beat(self, phase: str, *, collective: bool = False) -> None:
        self.phases.append(phase + collective * "+")


def failing_saves(world: World, folder: str) -> dict[str, Any]:
    engine = make_engine(run_config(1), world)
    log = Log(world.rank)
    result: dict[str, Any] = {}

    def saver(name: str, told: Told, **config: Any) -> Saver:
        return Saver(
            Failing(Path(folder) / name), engine, world, attempt=1,
            config=CheckpointConfig(**{"every_steps": 1, "keep_last": 9, **config}), guard=nothing,
            beat=told.beat, reporter=told, log=log,
            memory=MemorySaver(None, engine, world, attempt=1, guard=nothing, log=log),
        )  # fmt: skip

    def good(name: str) -> list[int]:
        barrier()
        return sorted(info.step for info in list_checkpoints(open_store(Path(folder) / name)) if not info.problem)

    told = Told()
    one = saver("one", told, max_save_failures=1)
    steps = []
    with redirect_stderr(io.StringIO()):
        for step in (1, 2, 3):
            one.settle()
            Failing.left = int(step == 2 and world.rank == 1)
            one.save(_state(step))
            steps.append(one.saved_step)
        one.settle()
    phases = [phase for phase, _ in itertools.groupby(told.phases)]
    result["one rank"] = {"saved_step": steps, "good": good("one"), "events": told.events, "phases": phases}

    told = Told()
    tier = MemoryTier.open(Path(folder), MemoryOwner(folder, "1"), world)
    copies = MemorySaver(tier, engine, world, attempt=1, guard=lambda: told.phases.append("guard"), log=log)
    for step in (1, 2):
        copies.save(_state(step), told.beat)
        time.sleep(0.5)  # the guard of the writing thread comes before that of the next copy
    result["memory"] = [phase for phase, _ in itertools.groupby(told.phases)]
    copies.discard(told.beat)

    spent = saver("spent", Told(), max_save_failures=2)
    try:
        for step in (4, 5, 6, 7):
            spent.settle()
            Failing.left = 1
            spent.save(_state(step))
        result["budget"] = "no error"
    except PretrainError as error:
        result["budget"] = f"{type(error).__name__}: {error}"
    Failing.left = 0
    barrier()

    Failing.left = int(world.rank == 0)
    told = Told()
    last = saver("last", told)
    tried = 0
    original = last.save

    def counted(state: TrainingState) -> float:
        nonlocal tried
        tried += 1
        return original(state)

    last.save = counted  # type: ignore[method-assign]
    last.save_for_good(_state(7))
    first = tried
    last.save_for_good(_state(7))
    result["last state"] = {"tries": first, "good": good("last"), "again": tried - first}

    timed = saver("timed", Told(), every_minutes=0.2 / 60)
    clock = [timed.time_is_up]
    time.sleep(0.25)
    clock.append(timed.time_is_up)
    timed.save(_state(8))
    clock.append(timed.time_is_up)
    timed.settle()
    result["clock"] = clock
    one_kept = saver("one kept", Told(), keep_last=1)
    with redirect_stderr(io.StringIO()):
        for step in (1, 2):
            Failing.left = int(step == 2 and world.rank == 0)
            one_kept.save(_state(step))
            one_kept.settle()
    result["one kept"] = good("one kept")

    auto = saver("auto", Told(), every="auto", every_steps=10**6, expected_failure_hours=1e-6)
    due = [auto.time_is_up]  # nothing is measured yet
    auto.save(_state(1))
    auto.settle()
    time.sleep(0.5)
    due.append(auto.time_is_up)
    rare = saver("rare", Told(), every="auto", every_steps=10**6, expected_failure_hours=1e6)
    rare.save(_state(1))
    rare.settle()
    time.sleep(0.5)
    due.append(rare.time_is_up)
    result["auto"] = due
    data = StepData(0, (), 0, 0, 0)
    result["agreed"] = [
        agree(data, StopReason.NONE, save_due=wish and world.is_main).save_due for wish in (True, False)
    ]
    engine.close()
    return result


def _state(step: int) -> TrainingState:
    return TrainingState(step=step, data=DataState(next_row=4 * step, seed=1, segments=(), skips=(), quarantine=()))
