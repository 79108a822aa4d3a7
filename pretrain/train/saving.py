"""Checkpoints as the loop sees them: restore once, save at boundaries, notice when a save is done or failed.

takes → engine and TrainingState; gives → the state to go on from. At most one durable save is in flight.
A save that fails on any rank is told to all before the next one, which is the retry; after
`checkpoint.max_save_failures` in a row the run ends. Only rank 0 prunes and reports, after the
manifest is published.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from pretrain.checkpoint import (
    Best,
    Restored,
    Retention,
    SaveHandle,
    Selection,
    discard_after,
    prepare_copy,
    restore,
    save,
    start_from,
)
from pretrain.checkpoint.format import parse_name
from pretrain.checkpoint.interval import FailureRate
from pretrain.config.schema import CheckpointConfig, StartFromConfig
from pretrain.engine.distributed import gather_texts, vote
from pretrain.engine.engine import Engine
from pretrain.errors import PretrainError, StoreError, UserError
from pretrain.log import Log
from pretrain.rundir import RunDirectory
from pretrain.store import Store
from pretrain.topology import World
from pretrain.train.interval import IntervalAdvisor
from pretrain.train.memory import MemorySaver
from pretrain.train.pruning import Pruner
from pretrain.train.reporter import Reporter
from pretrain.train.state import TrainingState
from pretrain.train.watch import Beat

_RETRY_S = 1.0  # between two tries to save the last state of a run


class Saver:
    """The run's checkpoints, for one rank of one attempt.

    Attributes:
        saved_step: step of the newest durable checkpoint that this attempt restored or began to save.
    """

    def __init__(
        self,
        checkpoints: Store,
        engine: Engine,
        world: World,
        *,
        attempt: int,
        config: CheckpointConfig,
        guard: Callable[[], None],
        beat: Beat,
        reporter: Reporter,
        log: Log,
        memory: MemorySaver,
        failures: FailureRate = FailureRate(),  # noqa: B008 (frozen)
    ) -> None:
        """
        Args:
            guard: raises FencedError when this attempt may not publish any more.
            beat: told the phase that is entered: `save` for what waits for a disk, again at each bit of progress,
                `copy` for the copy of the state, `load` for a restore.
            memory: the tier of copies in memory.
            failures: of earlier attempts, as rank 0 counted them.
        """
        self._checkpoints, self._engine, self._world = checkpoints, engine, world
        self._attempt, self._config = attempt, config
        self._guard, self._beat = guard, beat
        self._pruner = Pruner(checkpoints, _retention(config), guard, log)
        self._reporter, self._log = reporter, log
        self._memory = memory
        self._handle: SaveHandle | None = None
        self._unsettled = ""  # name of the save whose end the ranks have not told each other yet
        self._problem = ""  # why it failed on this rank
        self._failures = 0
        self._saved_at = time.monotonic()
        self._advisor = IntervalAdvisor(config, failures)
        self._validation: tuple[int, Mapping[str, Mapping[str, Any]]] = (-1, {})
        self._first_save: tuple[float, int] | None = None
        self.saved_step: int | None = None

    def restore(self) -> TrainingState | None:
        """Loads the newest good checkpoint of both tiers into the engine; None if there is none. A collective.

        Raises:
            CheckpointError: checkpoints are there, but none is good.
        """
        self._prepare_store()
        restored: Restored | None = restore(self._checkpoints, self._engine, self._world, memory=self._memory.tier)
        self._memory.note(restored)
        prepare_copy(self._engine)
        self._saved_at = time.monotonic()
        if restored is None:
            self._start_from(self._config.start_from)
            return None
        for note in restored.notes:
            self._log.warning(note)
        for name, why in restored.skipped:
            self._log.warning("checkpoint skipped", checkpoint=name, why=why)
        tier = "memory" if restored.from_memory else "durable"
        self._log.info("restored", checkpoint=restored.name, step=restored.step, tier=tier)
        self._reporter.event("restored", attempt=self._attempt, checkpoint=restored.name, step=restored.step, tier=tier)
        self.saved_step = None if restored.from_memory else restored.step
        return TrainingState.from_json(restored.training_state)

    def restore_earlier(self, step: int) -> TrainingState | None:
        """Loads the newest good checkpoint of at most `step` and deletes the later ones. A collective.

        The later ones stand beyond rows that are about to be jumped over, and their names will be used again.

        Raises:
            StoreError: a deletion failed.
        """
        self.settle()
        self._pruner.finish(self._waits)
        self._memory.settle(self._beat)
        self._beat("load", collective=True)
        restored = restore(
            self._checkpoints,
            self._engine,
            self._world,
            memory=self._memory.tier,
            newest_step=step,
            beat=functools.partial(self._beat, "load"),
        )
        if restored is None:
            return None
        problem = ""
        try:
            if self._world.is_main:
                loads = functools.partial(self._beat, "load")
                discard_after(self._checkpoints, restored.step, self._guard, loads)
        except PretrainError as error:
            problem = str(error)
        self._beat("load", collective=True)
        vote(not problem, problem, error=StoreError)
        self._memory.go_back(restored)
        self.saved_step = None if restored.from_memory else restored.step
        self._log.info("went back", checkpoint=restored.name, step=restored.step)
        return TrainingState.from_json(restored.training_state)

    def _prepare_store(self) -> None:
        """Before an attempt reads or writes: another run's checkpoints are refused, leftovers removed. A collective.

        Raises:
            UserError: checkpoint.directory belongs to another run, on every rank.
        """
        problem = ""
        if self._world.is_main:
            try:
                names = self._checkpoints.names() if self._attempt == 1 and self._config.directory else []
                # An import publishes its weights as attempt 0, before the first one.
                if any((parse_name(name) or (0, 0))[0] > 0 for name in names):
                    problem = (
                        f"checkpoint.directory={self._config.directory} holds checkpoints, and this run has none yet. "
                        "Each run needs a directory of its own. Name an empty one; to begin with another run's weights "
                        "set checkpoint.start_from."
                    )
                else:
                    removed = self._checkpoints.remove_unfinished()
                    if removed:
                        self._log.info("removed what interrupted saves had left", files=removed)
            except StoreError as error:  # what was left takes space, nothing else
                self._log.warning("leftovers of interrupted saves could not be removed", why=error)
        vote(not problem, problem, error=UserError)

    def _start_from(self, config: StartFromConfig | None) -> None:
        """Takes another run's weights over if the config says so. A collective."""
        if config is None:
            return
        selection = Selection(config.only, config.leave_out, config.optimizer == "keep")
        other = RunDirectory.locate(config.run).checkpoints
        started = start_from(other, config.checkpoint, self._engine, self._world, selection)
        for note in started.notes:
            self._log.warning(note)
        place = f"{config.run}:{config.checkpoint}"
        told = {"checkpoint": place, "taken": len(started.taken), "left": len(started.left)}
        self._log.info("started from another run", **told, optimizer=config.optimizer)
        if started.left:
            self._log.info(f"as initialised: {', '.join(started.left[:12])}{' …' if started.left[12:] else ''}")
        self._reporter.event("started_from", attempt=self._attempt, step=0, optimizer=config.optimizer, **told)

    @property
    def time_is_up(self) -> bool:
        """Whether a durable save is due by the clock, counted from the begin of the last one. Rank 0 decides."""
        minutes, advised_s = self._config.every_minutes, self._advisor.seconds
        limits_s = [60 * minutes] if minutes is not None else []
        if self._config.every == "auto" and advised_s is not None:
            limits_s.append(advised_s)
        return self._world.is_main and bool(limits_s) and time.monotonic() - self._saved_at >= min(limits_s)

    @property
    def memory_copy_step(self) -> int | None:
        """Step of the newest complete copy in the memory of the nodes."""
        return self._memory.copied_step

    def note_validation(self, step: int, losses: Mapping[str, Mapping[str, Any]]) -> None:
        """Metrics by source, kept with the checkpoint of the same step."""
        self._validation = (step, losses)

    def save(self, state: TrainingState) -> float:
        """Begins to save; gives the seconds that the caller stood still. A collective.

        Raises:
            StoreError: too many saves in a row failed.
        """
        self.settle()
        step, losses = self._validation
        self._beat("copy", collective=True)
        handle = save(
            self._checkpoints,
            self._engine,
            step=state.step,
            attempt=self._attempt,
            training_state=state.to_json(),
            world=self._world,
            guard=self._guard,
            origin={"validation": losses} if step == state.step else None,
            tell=self._beat,
        )
        self.saved_step, self._unsettled = state.step, handle.name
        self._handle, self._saved_at = handle, time.monotonic()
        self.poll()
        return handle.stall_s

    def save_for_good(self, state: TrainingState) -> None:
        """Saves the last state of a run, unless that very step is durable already, and gives memory back. A collective.

        Raises:
            StoreError: too many saves in a row failed.
        """
        self.settle()
        while self.saved_step != state.step:
            if self._failures:
                time.sleep(_RETRY_S)
            self.save(state)
            self.settle()
        self._pruner.finish(self._waits)
        self._memory.discard(self._beat)

    def copy_to_memory(self, state: TrainingState) -> float:
        """Begins a copy into the memory tier; gives the seconds that the caller stood still. A collective."""
        self.poll()
        return self._memory.save(state, self._beat)

    def close(self) -> None:
        """Ends what serves other ranks. No collective."""
        self._memory.close()

    def poll(self) -> None:
        """Takes note of a save that has ended on this rank; never waits. Raises FencedError."""
        if self._handle is not None and self._handle.done:
            self._conclude(self._handle)

    def settle(self) -> None:
        """Waits for the save in flight; all ranks learn how it ended. A collective.

        Raises:
            StoreError: it failed, and so did too many before it.
            FencedError: a newer attempt has the run.
        """
        self._beat("save")
        self._pruner.finish(self._waits)
        if not self._unsettled:
            return
        if self._handle is not None:
            self._handle.watch(self._waits)
            self._conclude(self._handle)
        self._beat("save", collective=True)
        problems = sorted({text for text in gather_texts(self._problem) if text})
        name, self._unsettled, self._problem = self._unsettled, "", ""
        if not problems:
            self._failures = 0
            return
        step, self.saved_step = self.saved_step, None
        self._failures += 1
        why = "; ".join(problems)
        self._reporter.event("save_failed", attempt=self._attempt, step=step, checkpoint=name, message=why)
        limit = self._config.max_save_failures
        if self._failures > limit:
            raise StoreError(
                f"{self._failures} saves in a row failed, the last one of {name}: {why} "
                f"checkpoint.max_save_failures={limit} allows no more. Mend the storage and resume the run."
            )
        self._log.error("not saved; the next save tries again", checkpoint=name, failures=self._failures, why=why)

    def _conclude(self, handle: SaveHandle) -> None:
        """Takes a finished save's result on this rank; rank 0 reports and prunes."""
        self._handle = None
        try:
            handle.wait()
        except StoreError as error:
            self._problem = str(error)
            return
        if not self._world.is_main:
            return
        self._log.info("saved", checkpoint=handle.name, step=self.saved_step)
        self._advise(handle)
        cost = {"bytes": handle.bytes, "stall_s": round(handle.stall_s, 4), "write_s": round(handle.write_s, 4)}
        self._reporter.event(
            "committed", attempt=self._attempt, step=self.saved_step, checkpoint=handle.name, tier="durable", **cost
        )
        self._pruner.begin()

    def _advise(self, handle: SaveHandle) -> None:
        self._advisor.note_save(handle.stall_s, handle.write_s)
        advice = self._advisor.advice(self._steps_per_s())
        if advice:
            self._log.info(advice)

    def _steps_per_s(self) -> float | None:
        """Speed since the first save, saves included."""
        now, step = time.monotonic(), self.saved_step or 0
        first_t, first_step = self._first_save = self._first_save or (now, step)
        return (step - first_step) / (now - first_t) if step > first_step and now > first_t else None

    def _waits(self) -> None:
        self._beat("save")


def _retention(config: CheckpointConfig) -> Retention:
    best = config.keep_best and Best(config.keep_best.source, config.keep_best.metric, config.keep_best.count)
    return Retention(config.keep_last, config.keep_every_steps, best or None)
