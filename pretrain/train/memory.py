"""The memory tier as the loop sees it: a copy every few steps, two kept, given back at the end.

takes → engine, directory, World; gives → seconds that the caller stood still. A copy that fails costs
nothing but itself: it is logged, and the next one is tried. A copy counts when all ranks have said
that theirs is done, which they do together before the next one is begun.
"""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from pretrain.checkpoint import COPIES, MemoryTier, Restored, SaveHandle, file_bytes, save
from pretrain.checkpoint.format import parse_name
from pretrain.config.schema import CheckpointConfig
from pretrain.engine.distributed import broadcast_bytes, gather_texts, vote
from pretrain.engine.engine import Engine
from pretrain.engine.state import Stateful
from pretrain.errors import PretrainError, StoreError, UserError
from pretrain.log import Log
from pretrain.rundir import RunDirectory
from pretrain.rundir.memory_folders import MemoryOwner, remove_orphans, run_uuid
from pretrain.topology import World
from pretrain.train.state import TrainingState
from pretrain.train.watch import Beat


def open_memory_tier(config: CheckpointConfig, run: RunDirectory, engine: Engine, world: World) -> MemoryTier | None:
    """This node's part of the tier if the config wants one, with room for two copies. A collective.

    Whatever is left there of runs that are over, or of this run while it wants no tier, is removed.

    Raises:
        UserError: the directory cannot be used, or is too small; the message has the numbers.
        StoreError: the run's uuid cannot be read or written.
    """
    base = Path(config.ram_directory)
    identifier, problem = "", ""
    if world.is_main:
        try:
            identifier = run_uuid(run.checkpoints)
        except PretrainError as error:
            problem = str(error)
    vote(not problem, problem, error=StoreError)
    identifier = broadcast_bytes(identifier.encode() if world.is_main else None).decode()
    if world.local_rank == 0:
        remove_orphans(base, without=None if config.ram_every_steps else identifier)
    if config.ram_every_steps is None:
        return None
    tier = MemoryTier.open(base, MemoryOwner(run.url, identifier), world, with_partner=config.ram_partner)
    _check_room(config, tier, engine, world)
    return tier


def _check_room(config: CheckpointConfig, tier: MemoryTier, engine: Stateful, world: World) -> None:
    """Raises UserError on all ranks when a node's directory does not hold two copies of what its ranks own."""
    shares = [int(text) for text in gather_texts(str(file_bytes(engine)))]
    needed = COPIES * sum(shares[rank] for rank in tier.ranks_kept_here)
    problem = ""
    if tier.is_leader:
        free = shutil.disk_usage(config.ram_directory).free + tier.held_bytes()
        usable = min(free, psutil.virtual_memory().available + tier.held_bytes())
        if needed > usable:
            what = "free there" if free <= usable else "of memory available"
            ranks = len(tier.ranks_kept_here)
            problem = (
                f"checkpoint.ram_every_steps={config.ram_every_steps} needs {needed / 1e6:.4g} MB in "
                f"{config.ram_directory} on {os.uname().nodename} ({COPIES} copies for {ranks} ranks), "
                f"and {usable / 1e6:.4g} MB are {what}. Both copies must fit. Enlarge the tmpfs (mount -o "
                "remount,size=, docker --shm-size), name another one with checkpoint.ram_directory, or remove "
                "checkpoint.ram_every_steps."
            )
    problems = sorted({text for text in gather_texts(problem) if text})
    if problems:
        raise UserError("; ".join(problems))


class MemorySaver:
    """The copies that one rank of one attempt makes; without a tier nothing happens."""

    def __init__(
        self,
        tier: MemoryTier | None,
        engine: Engine,
        world: World,
        *,
        attempt: int,
        guard: Callable[[], None],
        log: Log,
    ) -> None:
        self.tier = tier
        self._engine, self._world, self._attempt = engine, world, attempt
        self._guard, self._log = guard, log
        self._pending: SaveHandle | None = None
        self._complete: str | None = None

    @property
    def copied_step(self) -> int | None:
        """Step of the newest complete copy."""
        found = parse_name(self._complete) if self._complete else None
        return found and found[1]

    def note(self, restored: Restored | None) -> None:
        """Takes the copy that was restored as the newest complete one, and logs those that could not be used."""
        if self.tier is None:
            return
        if restored is not None and restored.from_memory:
            self._complete = restored.name
        for name, why in self.tier.passed_over if restored is None else []:
            self._log.warning("copy in memory skipped", checkpoint=name, why=why)

    def save(self, state: TrainingState, beat: Beat) -> float:
        """Begins a copy; gives the seconds that the caller stood still. A collective.

        Args:
            beat: told the phase that is entered: `save` while the run's directory or an earlier copy is waited for,
                `copy` for the copy itself.

        Raises:
            FencedError: a newer attempt has the run.
        """
        if self.tier is None:
            return 0.0
        started = time.perf_counter()
        beat("save")
        self._finish(beat)
        self._guard()
        beat("copy", collective=True)
        self.tier.keep([self._complete] if self._complete else [])
        self._pending = save(
            self.tier.store,
            self._engine,
            step=state.step,
            attempt=self._attempt,
            training_state=state.to_json(),
            world=self._world,
            guard=self._guard,
            in_parts=True,
            partner=self.tier.partner,
            tell=beat,
        )
        return time.perf_counter() - started

    def settle(self, beat: Beat) -> None:
        """Waits for the copy that is under way, with a `beat` at each bit of its progress. A collective."""
        if self.tier is not None:
            self._finish(beat)

    def go_back(self, restored: Restored) -> None:
        """Forgets every copy but the one that was restored, if it was one."""
        self._complete = restored.name if restored.from_memory else None
        if self.tier is not None:
            self.tier.keep([self._complete] if self._complete else [])

    def discard(self, beat: Beat) -> None:
        """Gives the memory back, once the last state is durable. A collective."""
        if self.tier is None:
            return
        self._finish(beat)
        self.tier.discard()

    def close(self) -> None:
        """Serves other nodes no more. No collective."""
        if self.tier is not None:
            self.tier.close()

    def _finish(self, beat: Beat) -> None:
        """Waits for the copy that is under way on any rank; all learn whether it is complete. A collective."""
        name, problem = None, ""
        if self._pending is not None:
            name = self._pending.name
            try:
                self._pending.watch(functools.partial(beat, "save"))
                self._pending.wait()
                if self._pending.warning:
                    self._log.warning("no second copy on the partner node", checkpoint=name, why=self._pending.warning)
            except StoreError as error:
                problem = str(error)
        self._pending = None
        beat("save", collective=True)
        problems = [text for text in gather_texts(problem) if text]
        if problems:
            self._log.warning("no copy in memory", checkpoint=name, why="; ".join(sorted(set(problems))))
        elif name is not None:
            self._complete = name
