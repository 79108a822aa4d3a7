"""Restoring: find the newest good checkpoint, verify it, read this rank's share, all ranks as one.

takes -> store of checkpoints, memory tier, engine; gives -> what was restored and what was passed over, and why.
The newest of both tiers comes first; of equally new ones that in memory, which is read faster.
Invariants: rank 0 alone chooses and all follow; every file is hashed by exactly one rank and all ranks
vote before a weight is used; what does not fit the model is an error that names it, never a fresh
weight; published checkpoints that are all damaged are an error, never a start from scratch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from pretrain.checkpoint.files import CheckpointFiles, content_problem
from pretrain.checkpoint.format import MANIFEST, Manifest, parse_name
from pretrain.checkpoint.listing import CheckpointInfo, list_checkpoints
from pretrain.checkpoint.memory import MemoryCopy, MemoryTier
from pretrain.engine.distributed import broadcast_bytes, gather_texts, vote
from pretrain.engine.state import Scalars, Stateful
from pretrain.errors import CheckpointError, PretrainError
from pretrain.faults import passing
from pretrain.store import Store
from pretrain.topology import World

_NAMES_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Restored:
    """What the engine now holds.

    Attributes:
        skipped: newer ones that were passed over, (name, why).
        from_memory: whether it came from the memory tier.
    """

    name: str
    step: int
    training_state: dict[str, Any]
    skipped: list[tuple[str, str]] = field(default_factory=list)
    from_memory: bool = False


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
) -> Restored | None:
    """Restores the newest good checkpoint of both tiers, or the durable one called `name`. A collective.

    Args:
        newest_step: nothing later than this is considered.

    Returns:
        None when none was ever published durably and memory holds nothing that can be used.

    Raises:
        CheckpointError: `name` is absent or bad; all published ones are damaged; the model does not fit.
    """
    durable, skipped = _choose(store, world, name)
    candidates = [_Candidate(durable_name) for durable_name in durable]
    if memory is not None and name is None:
        candidates += [_Candidate(copy.name, copy) for copy in memory.copies()]
    if newest_step is not None:
        candidates = [candidate for candidate in candidates if candidate.order[0][0] <= newest_step]
    passing("load.chosen")
    for candidate in sorted(candidates, key=lambda one: one.order, reverse=True):
        if candidate.copy is not None and memory is not None:
            manifest, problem = _try_memory(memory, engine, candidate.copy)
        else:
            manifest, problem = _try_durable(store, world, engine, candidate.name)
        if manifest is not None and problem is None:
            training_state = manifest.training_state
            passing("load.done", candidate.name)
            return Restored(candidate.name, manifest.step, training_state, skipped, candidate.copy is not None)
        skipped.append((candidate.label, problem or "unreadable"))
        if candidate.copy is not None and memory is not None:
            memory.passed_over.append((candidate.label, problem or "unreadable"))
    lost = [why for label, why in skipped if why != CheckpointInfo.UNFINISHED and not label.endswith(" in memory")]
    if name is None and not lost:
        return None
    listed = "\n".join(f"  - {skipped_name}: {why}" for skipped_name, why in skipped)
    raise CheckpointError(
        f"no good checkpoint in {store.url}:\n{listed}\nA run goes on from a verified checkpoint or not at all. "
        "Bring a copy back, or start again under another --name."
    )


def _try_durable(store: Store, world: World, engine: Stateful, name: str) -> tuple[Manifest | None, str | None]:
    """Verifies and reads a durable checkpoint; gives its manifest, or why it cannot be used. A collective."""
    manifest, problem = _manifest(store, world, name)
    if manifest is None:
        return None, problem
    mine = replace(manifest, files=manifest.files[world.rank :: world.size])
    return manifest, _verify(store, mine) or _read(store, engine, manifest, *_what_fits(manifest, engine))


def _try_memory(memory: MemoryTier, engine: Stateful, copy: MemoryCopy) -> tuple[Manifest | None, str | None]:
    """The same for a copy in memory, of which a rank sees what lies on its own node. A collective."""
    if copy.problem:
        return None, copy.problem
    problem = _verify(memory.store, memory.to_verify(copy))
    return copy.manifest, problem or _read(
        memory.store, engine, memory.readable(copy), *_what_fits(copy.manifest, engine)
    )


def _choose(store: Store, world: World, name: str | None) -> tuple[list[str], list[tuple[str, str]]]:
    """Rank 0's list of whole-looking checkpoints, newest first, and of those passed over. A collective."""
    answer: dict[str, Any] = {}
    if world.is_main:
        try:
            found = list_checkpoints(store)
            if name is None:
                good = [info.name for info in found if info.problem is None]
                newest_good = next((i for i, info in enumerate(found) if info.problem is None), len(found))
                answer = {"good": good, "bad": [(i.name, i.problem) for i in found[:newest_good]]}
            else:
                answer = _named(store, found, name)
        except PretrainError as error:
            answer = {"error": str(error)}
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


def _manifest(store: Store, world: World, name: str) -> tuple[Manifest | None, str | None]:
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


def _verify(store: Store, mine: Manifest) -> str | None:
    """Hashes the files that are this rank's to hash; gives all problems of all ranks. A collective."""
    problems = [problem for file in mine.files if (problem := content_problem(store, mine.name, file))]
    return "; ".join(text for text in gather_texts("; ".join(problems)) if text) or None


def _read(
    store: Store, engine: Stateful, manifest: Manifest, element_keys: tuple[str, ...], scalars: Scalars
) -> str | None:
    """Fills this rank's state; gives the problems of all ranks. A collective."""
    problem = ""
    passing("load.verified", manifest.name)
    fragments = engine.begin_restore(element_keys, scalars)
    try:
        with CheckpointFiles(store.child(manifest.name), manifest) as files:
            for fragment in fragments:
                for key, view in fragment.tensors.items():
                    files.fill(view, key, fragment.name, fragment.start)
    except PretrainError as error:
        problem = str(error)
    passing("load.read", manifest.name)
    problems = [text for text in gather_texts(problem) if text]
    if problems:
        return "; ".join(problems)
    engine.end_restore()
    vote(True)
    return None


def _what_fits(manifest: Manifest, engine: Stateful) -> tuple[tuple[str, ...], Scalars]:
    """Optimizer state to take over. Every rank has the same manifest and model, so all raise alike.

    Raises:
        CheckpointError: parameters or optimizer of the checkpoint are not the engine's.
    """
    _check_parameters(manifest, engine.shapes())
    spec, saved = engine.optimizer_spec(), manifest.optimizer
    kept = tuple(saved["element_keys"])
    lacking = [key for key in spec.element_keys if key not in kept]
    if saved["kind"] != spec.kind or (kept and lacking):
        raise CheckpointError(
            f"optimizer={spec.kind} does not fit {manifest.name}, which was saved by {saved['kind']} with "
            f"{', '.join(kept) or 'no state'}. A resume goes on with the same optimizer state. "
            "Set optimizer.kind back or start a new run."
        )
    groups = set(engine.hyperparameters())
    scalars = {group: values for group, values in saved["scalars"].items() if group in groups}
    if saved["scalars"] and set(scalars) != groups:
        raise CheckpointError(
            f"parameter groups {sorted(groups)} do not fit {manifest.name} with {sorted(saved['scalars'])}. "
            "The optimizer's step is kept by group. Use the version that saved it."
        )
    return tuple(key for key in kept if key in spec.element_keys), scalars


def _check_parameters(manifest: Manifest, wanted: dict[str, tuple[int, ...]]) -> None:
    saved = manifest.parameters
    lines = [
        *_line("missing in the checkpoint", [n for n in wanted if n not in saved]),
        *_line("unexpected in the checkpoint", [n for n in saved if n not in wanted]),
        *_line(
            "of another shape",
            [
                f"{n} {list(saved[n])} (model: {list(wanted[n])})"
                for n in wanted
                if n in saved and saved[n] != wanted[n]
            ],
        ),
    ]
    if lines:
        raise CheckpointError(
            f"{manifest.name} does not fit the model. Every parameter must be there with its shape. "
            "Set the model section back to what was saved, or start a new run.\n" + "\n".join(lines)
        )


def _line(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return [f"  {what}: {', '.join(names[:_NAMES_SHOWN])}{more}"]
