"""Saving: the loop waits for one copy to host memory; a thread hashes, writes and publishes.

takes -> engine, training state; gives -> a SaveHandle. Each rank writes its file and a sidecar, rank 0
publishes the manifest when all sidecars of this very save are there, so nothing is ever visible half.
The thread makes no collective. Its error surfaces in `wait()` and, on every rank, at the next save.
The copy has the layout of the file, so that it is written as it lies, and its memory is used again.
"""

from __future__ import annotations

import json
import platform
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from pretrain.checkpoint.copy import HostCopy, idle_copies
from pretrain.checkpoint.digests import Hashing, num_threads
from pretrain.checkpoint.format import (
    MANIFEST,
    FileEntry,
    Manifest,
    checkpoint_name,
    failure_file,
    part_file,
    rank_file,
    sidecar_file,
)
from pretrain.checkpoint.handle import SaveHandle, SaveProgress
from pretrain.checkpoint.peers import Peer
from pretrain.engine.distributed import gather_texts
from pretrain.engine.state import MASTER, Fragment, Savable
from pretrain.errors import FencedError, PretrainError, StoreError
from pretrain.faults import passing
from pretrain.rundir.records import decode_record, encode_record
from pretrain.store import NotFoundError, Store
from pretrain.topology import World

_NO_ID = "?" * 16  # stands in a file's header until the ranks have agreed on the id of a save
_POLL_S = (0.01, 0.5)  # first and longest wait between two looks for sidecars
_POLL_GROWTH = 1.2  # of the wait: what the last rank's file is published late by, against what was waited for it


@dataclass(frozen=True)
class _Job:
    """What the thread needs, all taken before the loop goes on."""

    store: Store  # the checkpoint's own folder
    name: str
    rank: int
    save_id: str
    manifest: Manifest  # without files
    ranges: tuple[tuple[int, int, int], ...]
    copy: HostCopy
    idle: list[HostCopy]  # where the copy goes back to
    guard: Callable[[], None]
    ranks: int
    ranks_here: int
    patience_s: float
    in_parts: bool
    partner: Peer | None


def save(
    store: Store,
    engine: Savable,
    *,
    step: int,
    attempt: int,
    training_state: dict[str, Any],
    world: World,
    guard: Callable[[], None],
    origin: dict[str, Any] | None = None,
    patience_s: float = 600.0,
    in_parts: bool = False,
    partner: Peer | None = None,
    tell: Callable[[str], None] = lambda phase: None,
) -> SaveHandle:
    """Begins to save the state at a step boundary. A collective; wait for the save before, first.

    Args:
        store: of the run's checkpoints.
        training_state: JSON, equal on all ranks.
        guard: called on rank 0 right before publishing; raises when this attempt lost the run.
        origin: facts for the record, for example the config's sha256.
        patience_s: how long rank 0 waits for the other ranks' files.
        in_parts: every rank publishes a part of the manifest beside its own file and waits for nobody, because
            `store` is not the same for all of them (memory tier).
        partner: another node that keeps a second copy of this rank's file and part; its failure is told by the
            handle and costs the save nothing.
        tell: called with what the copy is doing, see `HostCopy.take`.
    """
    started = time.perf_counter()
    name, shapes = checkpoint_name(step, attempt), engine.shapes()
    fragments, groups = engine.fragments(), engine.groups()
    idle = idle_copies(engine)
    copy = idle.pop() if idle else HostCopy()
    copy.take(fragments, {"format": "pt", "checkpoint": name, "rank": str(world.rank), "save_id": _NO_ID}, tell)
    # Behind the copy: before it, every rank would wait for the slowest one twice.
    save_id, kept = _agree(fragments, groups, world)
    copy.put_in_header(_NO_ID.encode(), save_id.encode())
    passing("save.copied", name)
    index = {parameter: position for position, parameter in enumerate(shapes)}
    manifest = replace(_described(engine, world, kept, origin), step=step, attempt=attempt, save_id=save_id)
    manifest = replace(manifest, training_state=training_state)
    ranges = tuple((index[f.name], f.start, f.length) for f in fragments)
    job = _Job(
        store.child(name), name, world.rank, save_id, manifest, ranges, copy, idle, guard, world.size,
        world.ranks_per_node, patience_s, in_parts, partner,
    )  # fmt: skip
    return SaveHandle(name, time.perf_counter() - started, lambda progress: _write(job, progress))


def _described(engine: Savable, world: World, kept: dict[str, list[str]], origin: dict[str, Any] | None) -> Manifest:
    """What the manifest says of the engine; step, attempt, state and files are still to come."""
    scalars = engine.optimizer_scalars()
    groups = {
        group: {"element_keys": kept.get(group, []), "scalars": scalars.get(group, {}), "hyperparameters": values}
        for group, values in engine.hyperparameters().items()
    }
    facts = {"ranks": world.size, "torch": torch.__version__, "python": platform.python_version(), **(origin or {})}
    return Manifest(
        step=0,
        attempt=0,
        save_id="",
        parameters=engine.shapes(),
        groups=engine.groups(),
        optimizer={"kind": engine.optimizer_spec().kind, "groups": groups},
        training_state={},
        origin=facts,
        files=(),
    )


def _agree(fragments: list[Fragment], groups: dict[str, str], world: World) -> tuple[str, dict[str, list[str]]]:
    """Rank 0's fresh save id, and the optimizer's keys by group: before its first step it has none. A collective.

    A rank that owns nothing of a group does not know its keys, so all ranks say what they have.
    """
    mine: dict[str, list[str]] = {}
    for fragment in fragments:
        mine.setdefault(groups[fragment.name], sorted(set(fragment.tensors) - {MASTER}))
    texts = gather_texts(json.dumps([secrets.token_hex(len(_NO_ID) // 2) if world.is_main else "", mine]))
    told = [json.loads(text) for text in texts]
    return told[0][0], {group: keys for _, found in told for group, keys in found.items()}


def _write(job: _Job, progress: SaveProgress) -> None:
    """The thread: own file, sidecar, and on rank 0 the manifest; or own file and own part of the manifest."""
    try:
        entry = _write_own_file(job, progress)
        passing("save.written", job.name)
        if job.in_parts:
            job.guard()
            part = replace(job.manifest, files=(entry,)).encode()
            job.store.put(part_file(job.rank), part)
            _copy_to_partner(job, part, progress)
            return
        job.store.put(sidecar_file(job.rank), encode_record(entry.to_json()))
        if job.rank:
            return
        files = [entry, *_others(job, progress)]
        manifest = replace(job.manifest, files=tuple(files))
        data, progress.bytes = manifest.encode(), manifest.total_bytes
        job.guard()
        passing("save.before_manifest", job.name)
        job.store.put(MANIFEST, data)
        passing("save.after_manifest", job.name)
    except FencedError:
        raise  # the run belongs to another attempt: touch nothing
    except PretrainError as error:
        _clean_up(job, error)
        raise
    finally:
        if not job.idle:
            job.idle.append(job.copy)


def _write_own_file(job: _Job, progress: SaveProgress) -> FileEntry:
    chunks = job.copy.chunks()

    def counted() -> Iterator[memoryview]:
        for chunk in chunks:
            yield chunk
            progress.step()

    with Hashing(num_threads(job.ranks_here)) as hashing:  # beside the writing, which waits for the disk
        hashing.begin(chunks)
        written = job.store.put_stream(rank_file(job.rank), counted())
        digests = hashing.results()
    return FileEntry(rank_file(job.rank), written, digests, job.save_id, job.ranges)


def _copy_to_partner(job: _Job, part: bytes, progress: SaveProgress) -> None:
    if job.partner is None:
        return
    folder = job.partner.child(job.name)
    try:
        folder.put(rank_file(job.rank), job.copy.chunks(), progress.step)
        folder.put(part_file(job.rank), [memoryview(part)])  # last: it says that the file is whole
    except StoreError as error:
        progress.warning = str(error)


def _others(job: _Job, progress: SaveProgress) -> list[FileEntry]:
    """Sidecars of this save of all other ranks, in their order; waits for them."""
    entries: dict[int, FileEntry] = {}
    deadline = time.monotonic() + job.patience_s
    pause = _POLL_S[0]
    while len(entries) < job.ranks - 1:
        for rank in range(1, job.ranks):
            if rank not in entries:
                entry = _sidecar(job, rank)
                if entry:
                    entries[rank] = entry
        if len(entries) == job.ranks - 1:
            break
        progress.step()
        if progress.cancelled.wait(pause) or time.monotonic() > deadline:
            missing = [rank for rank in range(1, job.ranks) if rank not in entries]
            raise StoreError(
                f"{job.name} was not published: ranks {missing} did not write their files "
                f"within {job.patience_s:g} s. Look into their logs."
            )
        pause = min(_POLL_GROWTH * pause, _POLL_S[1])
    return [entries[rank] for rank in sorted(entries)]


def _sidecar(job: _Job, rank: int) -> FileEntry | None:
    """A rank's sidecar if it belongs to this save. Raises StoreError when the rank says that it failed."""
    with suppress(NotFoundError):
        told = json.loads(job.store.get(failure_file(rank)))
        if told["save_id"] == job.save_id:
            raise StoreError(f"{job.name} was not published: rank {rank} failed: {told['error']}")
    try:
        data = job.store.get(sidecar_file(rank))
    except NotFoundError:
        return None
    entry = FileEntry.from_json(decode_record(data, f"{job.store.url}/{sidecar_file(rank)}", "Save again."))
    return entry if entry.save_id == job.save_id else None


def _clean_up(job: _Job, error: PretrainError) -> None:
    """Gives the space of a failed save back and tells rank 0, as far as the store still works."""
    with suppress(PretrainError):
        job.store.delete(sidecar_file(job.rank))
    with suppress(PretrainError):
        job.store.delete(rank_file(job.rank))
    if job.rank and not job.in_parts:
        with suppress(PretrainError):
            told = {"save_id": job.save_id, "error": str(error)}
            job.store.put(failure_file(job.rank), json.dumps(told).encode())
