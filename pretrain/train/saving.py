"""Checkpoints as the loop sees them: restore once, save at boundaries, notice when a save is done or failed.

takes → engine and TrainingState; gives → the state to go on from. At most one save is in flight; its
error surfaces at the next call here. Only rank 0 prunes and reports, after the manifest is published.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pretrain.checkpoint import Restored, SaveHandle, prune, restore, save
from pretrain.config.schema import CheckpointConfig
from pretrain.engine.engine import Engine
from pretrain.log import Log
from pretrain.store import Store
from pretrain.topology import World
from pretrain.train.memory import MemorySaver
from pretrain.train.reporter import Reporter
from pretrain.train.state import TrainingState


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
        beat: Callable[[], None],
        reporter: Reporter,
        log: Log,
        memory: MemorySaver,
    ) -> None:
        """
        Args:
            guard: raises FencedError when this attempt may not publish any more.
            beat: called while a wait for a save goes on, as long as the save makes progress.
            memory: the tier of copies in memory.
        """
        self._checkpoints, self._engine, self._world = checkpoints, engine, world
        self._attempt, self._config = attempt, config
        self._guard, self._beat = guard, beat
        self._reporter, self._log = reporter, log
        self._memory = memory
        self._pending: tuple[SaveHandle, int] | None = None
        self.saved_step: int | None = None

    def restore(self) -> TrainingState | None:
        """Loads the newest good checkpoint of both tiers into the engine; None if there is none. A collective.

        Raises:
            CheckpointError: checkpoints are there, but none is good.
        """
        restored: Restored | None = restore(self._checkpoints, self._engine, self._world, memory=self._memory.tier)
        self._memory.note(restored)
        if restored is None:
            return None
        for name, why in restored.skipped:
            self._log.warning("checkpoint skipped", checkpoint=name, why=why)
        tier = "memory" if restored.from_memory else "durable"
        self._log.info("restored", checkpoint=restored.name, step=restored.step, tier=tier)
        self._reporter.event("restored", attempt=self._attempt, checkpoint=restored.name, step=restored.step, tier=tier)
        self.saved_step = None if restored.from_memory else restored.step
        return TrainingState.from_json(restored.training_state)

    def save(self, state: TrainingState) -> float:
        """Begins to save; gives the seconds that the caller stood still. A collective.

        Raises:
            StoreError: this save or the one before could not be written.
        """
        self.finish()
        handle = save(
            self._checkpoints,
            self._engine,
            step=state.step,
            attempt=self._attempt,
            training_state=state.to_json(),
            world=self._world,
            guard=self._guard,
        )
        self.saved_step = state.step
        self._pending = (handle, state.step)
        self.poll()
        return handle.stall_s

    def copy_to_memory(self, state: TrainingState) -> float:
        """Begins a copy into the memory tier; gives the seconds that the caller stood still. A collective."""
        self.poll()
        return self._memory.save(state)

    def give_memory_back(self) -> None:
        """After the last state is durable: the copies in memory are of no use any more. A collective."""
        self._memory.discard()

    def poll(self) -> None:
        """Takes note of a save that has ended; never waits. Raises its error."""
        if self._pending and self._pending[0].done:
            self.finish()

    def finish(self) -> None:
        """Waits until the save in flight is published. Raises its error."""
        if self._pending is None:
            return
        handle, step = self._pending
        self._pending = None
        self._watch(handle)
        handle.wait()
        if not self._world.is_main:
            return
        self._log.info("saved", checkpoint=handle.name, step=step)
        self._reporter.event("committed", attempt=self._attempt, step=step, checkpoint=handle.name)
        for name in prune(self._checkpoints, self._config.keep_last, self._guard):
            self._log.info("pruned", checkpoint=name)

    def _watch(self, handle: SaveHandle) -> None:
        """Waits, with a sign of life for each bit of progress: a large save is slow, a stuck one is silent."""
        seen = handle.progress
        while not handle.done:
            time.sleep(0.01)
            if handle.progress != seen:
                seen = handle.progress
                self._beat()
