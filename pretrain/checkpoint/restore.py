"""Restoring: find the newest good checkpoint, read this rank's share and check it, all ranks as one.

takes -> store of checkpoints, memory tier, engine; gives -> what was restored and what was passed over, and why.
The newest of both tiers comes first; of equally new ones that in memory, which is read faster.
Invariants: rank 0 alone chooses and all follow; a rank reads and checks the pieces that hold its ranges, and all
ranks vote before a weight is used; what does not fit the model is an error that names it, never a fresh
weight; published checkpoints that are all damaged are an error, never a start from scratch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from pretrain.checkpoint.digests import num_threads
from pretrain.checkpoint.files import CheckpointFiles, DamagedError, Sources, only_in
from pretrain.checkpoint.fitting import Fitting, what_fits
from pretrain.checkpoint.format import MANIFEST, Manifest, parse_name
from pretrain.checkpoint.holds import set_aside
from pretrain.checkpoint.listing import CheckpointInfo, list_checkpoints
from pretrain.checkpoint.memory import MemoryCopy, MemoryTier
from pretrain.engine.distributed import broadcast_bytes, gather_texts, vote
from pretrain.engine.state import Stateful
from pretrain.errors import CheckpointError, PretrainError, StoreError
from pretrain.faults import passing
from pretrain.store import Store
from pretrain.topology import World


@dataclass(frozen=True, slots=True)
class Restored:
    """What the engine now holds.

    Attributes:
        skipped: newer ones that were passed over, (name, why).
        from_memory: whether it came from the memory tier.
        notes: what else a person should know: state that changed its type, pieces that were read twice.
    """

    name: str
    step: int
    training_state: dict[str, Any]
    skipped: list[tuple[str, str]] = field(default_factory=list)
    from_memory: bool = False
    notes: list[str] = field(default_factory=list)


@runtime_checkable
class Progress(Protocol):
    """Told of each bit of a restore's progress."""

    def __call__(self, *, collective: bool = False) -> None:
        """`collective`: from here on this rank waits for the others."""
        ...


def untold(*, collective: bool = False) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Something to restore from: a durable checkpoint, or a copy in memory."""

    name: str
    copy: MemoryCopy | None = None

    @property
    def order(self) -> tuple[tuple[int, int], bool]:
        return parse_name(self.name) or (0, 0), self.copy is not None

    @property
    def label(self) -> str:
        return f"{self.name} in memory" if self.copy else self.name


def restore(
    store: Store,
    engine: Stateful,
    world: World,
    *,
    name: str | None = None,
    memory: MemoryTier | None = None,
    newest_step: int | None = None,
    beat: Progress = untold,
) -> Restored | None:
    """Restores the newest good checkpoint of both tiers, or the durable one called `name`. A collective.

    Args:
        newest_step: nothing later than this is considered.
        beat: told of the progress, so that a slow store can be told from a hang.

    Returns:
        None when none was ever published durably and memory holds nothing that can be used.

    Raises:
        CheckpointError: `name` is absent or bad; all published ones are damaged; the model does not fit.
        StoreError: there is no other, and one could not be read now.
    """
    durable, skipped = shared_choice(store, world, name, beat)
    candidates = [_Candidate(durable_name) for durable_name in durable]
    if memory is not None and name is None:
        candidates += [_Candidate(copy.name, copy) for copy in memory.copies()]
    if newest_step is not None:
        candidates = [candidate for candidate in candidates if candidate.order[0][0] <= newest_step]
    passing("load.chosen")
    unreadable = False
    for candidate in sorted(candidates, key=lambda one: one.order, reverse=True):
        if candidate.copy is not None and memory is not None:
            manifest, filled = _try_memory(memory, engine, world, candidate.copy, beat, check_first=not durable)
        else:
            manifest, filled = _try_durable(store, world, engine, candidate.name, beat)
        if manifest is not None and filled.problem is None:
            state, in_memory = manifest.training_state, candidate.copy is not None
            passing("load.done", candidate.name)
            return Restored(candidate.name, manifest.step, state, skipped, in_memory, filled.notes)
        skipped.append((candidate.label, filled.problem or "unreadable"))
        unreadable = unreadable or filled.unreadable
        if candidate.copy is not None and memory is not None:
            memory.passed_over.append((candidate.label, filled.problem or "unreadable"))
    lost = [why for label, why in skipped if why != CheckpointInfo.UNFINISHED and not label.endswith(" in memory")]
    if name is None and not lost:
        return None
    listed = "\n".join(f"  - {skipped_name}: {why}" for skipped_name, why in skipped)
    kind = StoreError if unreadable else CheckpointError  # a store that fails now may answer the next start
    raise kind(
        f"no good checkpoint in {store.url}:\n{listed}\nA run goes on from a verified checkpoint or not at all. "
        "Bring a copy back, or start again under another --name."
    )


def _try_durable(
    store: Store, world: World, engine: Stateful, name: str, beat: Progress
) -> tuple[Manifest | None, Filled]:
    """Reads a durable checkpoint; gives its manifest, or why it cannot be used. A collective.

    One whose bytes are not as written is set aside, so that nobody reads it in vain again.
    """
    manifest, problem = shared_manifest(store, world, name)
    if manifest is None:
        return None, Filled(problem)
    found = fill_engine(only_in(store.child(name)), engine, world, manifest, what_fits(manifest, engine), beat=beat)
    if found.damaged and world.is_main:
        with suppress(StoreError):
            set_aside(store, name, found.problem or "")
    return manifest, found


def _try_memory(
    memory: MemoryTier, engine: Stateful, world: World, copy: MemoryCopy, beat: Progress, *, check_first: bool
) -> tuple[Manifest | None, Filled]:
    """The same for a copy in memory, of which a rank reads what it needs from the nodes that hold it. A collective.

    Args:
        check_first: check everything before the first weight is overwritten, for a fresh start is the alternative.
    """
    if copy.problem:
        return None, Filled(copy.problem)
    fitting, sources = what_fits(copy.manifest, engine), memory.sources(copy)
    return copy.manifest, fill_engine(
        sources, engine, world, copy.manifest, fitting, check_first=check_first, beat=beat
    )


def shared_choice(
    store: Store, world: World, name: str | None, beat: Progress = untold
) -> tuple[list[str], list[tuple[str, str]]]:
    """Rank 0's list of whole-looking checkpoints, newest first, and of those passed over. A collective."""
    answer: dict[str, Any] = {}
    if world.is_main:
        try:
            found = list_checkpoints(store, beat)
            if name is None:
                good = [info.name for info in found if info.problem is None]
                newest_good = next((i for i, info in enumerate(found) if info.problem is None), len(found))
                answer = {"good": good, "bad": [(i.name, i.problem) for i in found[:newest_good]]}
            else:
                answer = _named(store, found, name)
        except PretrainError as error:
            answer = {"error": str(error)}
    beat(collective=True)
    answer = json.loads(broadcast_bytes(json.dumps(answer).encode() if world.is_main else None))
    if "error" in answer:
        raise CheckpointError(answer["error"])
    return answer["good"], [(bad, why) for bad, why in answer["bad"]]


def _named(store: Store, found: list[CheckpointInfo], name: str) -> dict[str, Any]:
    match = next((info for info in found if info.name == name), None)
    if match is None:
        existing = ", ".join(info.name for info in found if info.problem is None) or "none"
        return {"error": f"checkpoint={name} does not exist in {store.url}. There are: {existing}. Name one of them."}
    if match.problem:
        return {"error": f"checkpoint={name} cannot be used: {match.problem}. Name another one."}
    return {"good": [name], "bad": []}


def shared_manifest(store: Store, world: World, name: str) -> tuple[Manifest | None, str | None]:
    """Rank 0 reads the manifest for all, so that all see the same. A collective."""
    data, problem = None, ""
    if world.is_main:
        try:
            data = store.get(f"{name}/{MANIFEST}")
        except PretrainError as error:
            problem = str(error)
    data = broadcast_bytes(data if data is not None else b"")
    if not data:
        return None, gather_texts(problem)[0] or f"{MANIFEST} is empty"
    try:
        return Manifest.decode(data, f"{store.url}/{name}/{MANIFEST}"), None
    except CheckpointError as error:
        return None, str(error)


@dataclass(frozen=True, slots=True)
class Filled:
    """What all ranks found: a problem, whether bytes are not as they were written or could not be read, other notes."""

    problem: str | None = None
    damaged: bool = False
    unreadable: bool = False
    notes: list[str] = field(default_factory=list)


def fill_engine(
    sources: Sources,
    engine: Stateful,
    world: World,
    manifest: Manifest,
    fitting: Fitting,
    *,
    only: set[str] | None = None,
    check_first: bool = False,
    beat: Progress = untold,
) -> Filled:
    """Fills this rank's state from pieces that were checked; gives the problems of all ranks. A collective.

    Args:
        only: names of the parameters to fill; the others keep what they have.
        check_first: read and check everything once more ahead, so that a problem leaves the weights as they were.
    """
    fragments = engine.begin_restore(fitting.element_keys, fitting.scalars)
    files = CheckpointFiles(sources, manifest, num_threads(world.ranks_per_node), beat)

    def plan() -> None:
        for fragment in fragments:
            for key, view in fragment.tensors.items() if only is None or fragment.name in only else ():
                files.plan(view, key, fragment.name, fragment.start)

    passing("load.verified", manifest.name)
    for action in (plan, *((files.check,) if check_first else ()), files.read):
        filled = _together(action, files, beat)
        passing("load.read", manifest.name)
        if filled.problem:
            if check_first and action != files.read:  # a fresh start follows: the optimizer has not stepped
                engine.begin_restore({}, {})
                engine.end_restore()
            return filled
    engine.end_restore()
    vote(True)
    return filled


def _together(action: Callable[[], None], files: CheckpointFiles, beat: Progress) -> Filled:
    """What came of something that every rank did. A collective."""
    problem, damaged, unreadable = "", False, False
    try:
        action()
    except PretrainError as error:
        problem, damaged, unreadable = str(error), isinstance(error, DamagedError), isinstance(error, StoreError)
    beat(collective=True)
    told = [json.loads(text) for text in gather_texts(json.dumps([problem, damaged, unreadable, files.notes()]))]
    problems = list(dict.fromkeys(text for text, _, _, _ in told if text))
    notes = sorted({note for _, _, _, found in told for note in found})
    any_damaged, any_unreadable = (any(entry[place] for entry in told) for place in (1, 2))
    return Filled("; ".join(problems) or None, any_damaged, any_unreadable, notes)
