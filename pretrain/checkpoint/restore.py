"""Restoring: find the newest good checkpoint, verify it, read this rank's share, all ranks as one.

takes -> store of checkpoints, engine; gives -> what was restored and what was passed over, and why.
Invariants: rank 0 alone chooses and all follow; every file is hashed by exactly one rank and all ranks
vote before a weight is used; what does not fit the model is an error that names it, never a fresh
weight; published checkpoints that are all damaged are an error, never a start from scratch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from pretrain.checkpoint.files import CheckpointFiles, content_problem
from pretrain.checkpoint.format import MANIFEST, Manifest
from pretrain.checkpoint.listing import CheckpointInfo, list_checkpoints
from pretrain.engine.distributed import broadcast_bytes, gather_texts, vote
from pretrain.engine.state import Scalars, Stateful
from pretrain.errors import CheckpointError, PretrainError
from pretrain.store import Store
from pretrain.topology import World

_NAMES_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Restored:
    """What the engine now holds.

    Attributes:
        skipped: newer ones that were passed over, (name, why).
    """

    name: str
    step: int
    training_state: dict[str, Any]
    skipped: list[tuple[str, str]] = field(default_factory=list)


def restore(store: Store, engine: Stateful, world: World, *, name: str | None = None) -> Restored | None:
    """Restores the newest good checkpoint, or `name`. A collective.

    Returns:
        None when none was ever published (folders of unfinished saves do not count).

    Raises:
        CheckpointError: `name` is absent or bad; all published ones are damaged; the model does not fit.
    """
    candidates, skipped = _choose(store, world, name)
    if not candidates and not skipped:
        return None
    for candidate in candidates:
        manifest, problem = _manifest(store, world, candidate)
        if manifest is not None:
            problem = _verify(store, world, manifest)
        if manifest is not None and problem is None:
            element_keys, scalars = _what_fits(manifest, engine)
            problem = _read(store, engine, manifest, element_keys, scalars)
        if manifest is not None and problem is None:
            return Restored(candidate, manifest.step, manifest.training_state, skipped)
        skipped.append((candidate, problem or "unreadable"))
    if name is None and all(why == CheckpointInfo.UNFINISHED for _, why in skipped):
        return None
    listed = "\n".join(f"  - {skipped_name}: {why}" for skipped_name, why in skipped)
    raise CheckpointError(
        f"no good checkpoint in {store.url}:\n{listed}\nA run goes on from a verified checkpoint or not at all. "
        "Bring a copy back, or start again under another --name."
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


def _verify(store: Store, world: World, manifest: Manifest) -> str | None:
    """Each rank hashes every R-th file; gives all problems of all ranks. A collective."""
    mine = manifest.files[world.rank :: world.size]
    problems = [problem for file in mine if (problem := content_problem(store, manifest.name, file))]
    return "; ".join(text for text in gather_texts("; ".join(problems)) if text) or None


def _read(
    store: Store, engine: Stateful, manifest: Manifest, element_keys: tuple[str, ...], scalars: Scalars
) -> str | None:
    """Fills this rank's state; gives the problems of all ranks. A collective."""
    problem = ""
    fragments = engine.begin_restore(element_keys, scalars)
    try:
        with CheckpointFiles(store.child(manifest.name), manifest) as files:
            for fragment in fragments:
                for key, view in fragment.tensors.items():
                    files.fill(view, key, fragment.name, fragment.start)
    except PretrainError as error:
        problem = str(error)
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
