"""Saving: the loop waits for one copy to host memory; a thread hashes, writes and publishes.

takes -> engine, training state; gives -> a SaveHandle. Each rank writes its file and a sidecar, rank 0
publishes the manifest when all sidecars of this very save are there, so nothing is ever visible half.
The thread makes no collective. Its error surfaces in `wait()` and, on every rank, at the next save.
The copy has the layout of the file, so that it is written as it lies, and its memory is used again.
"""

from __future__ import annotations

import hashlib
import json
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from pretrain.checkpoint.files import CHUNK_BYTES
from pretrain.checkpoint.format import (
    MANIFEST,
    FileEntry,
    Manifest,
    checkpoint_name,
    failure_file,
    rank_file,
    safetensors_header,
    sidecar_file,
    tensor_name,
)
from pretrain.engine.distributed import gather_texts
from pretrain.engine.state import MASTER, Fragment, Stateful
from pretrain.errors import FencedError, PretrainError, StoreError
from pretrain.rundir.records import decode_record, encode_record
from pretrain.store import NotFoundError, Store
from pretrain.topology import World

_POLL_S = (0.01, 0.5)  # first and longest wait between two looks for sidecars


@dataclass
class HostCopy:
    """This rank's state as the bytes of its file; the data buffer is used again by the next save."""

    header: bytes = b""
    data: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    used: int = 0

    def take(self, fragments: list[Fragment], keys: tuple[str, ...], metadata: dict[str, str]) -> None:
        """Copies every fragment's tensors, key by key. The only part of a save that the loop waits for."""
        order = [(key, fragment) for key in keys for fragment in fragments]
        order.sort(key=lambda entry: -entry[1].tensors[entry[0]].element_size())  # stable; keeps all aligned
        sizes = [(tensor_name(key, f.name), f.tensors[key].dtype, f.length) for key, f in order]
        self.header = safetensors_header(sizes, metadata)
        self.used = sum(dtype.itemsize * count for _, dtype, count in sizes)
        if self.data.numel() < self.used:
            pin = any(f.tensors[MASTER].is_cuda for f in fragments[:1])
            self.data = torch.empty(self.used, dtype=torch.uint8, pin_memory=pin)
        position = 0
        for (key, fragment), (_, dtype, count) in zip(order, sizes, strict=True):
            end = position + count * dtype.itemsize
            self.data[position:end].view(dtype).copy_(fragment.tensors[key], non_blocking=True)
            position = end
        if self.data.is_pinned():
            torch.cuda.synchronize()

    def chunks(self) -> Iterator[memoryview]:
        yield memoryview(self.header)
        view = memoryview(self.data[: self.used].numpy())
        for start in range(0, self.used, CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]


# The buffer of the save before, as long as its engine lives. A save that overlaps takes a new one.
_idle_copies: WeakKeyDictionary[Stateful, list[HostCopy]] = WeakKeyDictionary()


@dataclass
class SaveProgress:
    """What the thread and the handle share: chunks written and looks for other ranks so far; a wish to give up."""

    count: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)


class SaveHandle:
    """A save under way.

    Attributes:
        name: of the checkpoint.
        stall_s: seconds that the caller stood still.
    """

    def __init__(self, name: str, stall_s: float, work: Callable[[SaveProgress], None]) -> None:
        self.name, self.stall_s = name, stall_s
        self._work = work
        self._error: PretrainError | None = None
        self._progress = SaveProgress()
        self._thread = threading.Thread(target=self._run, name=f"save {name}", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when this rank's part is durable; on rank 0: when the checkpoint is published. No collective.

        Raises:
            StoreError: it could not be written; nothing of it counts.
            FencedError: a newer attempt has the run.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Stops waiting for other ranks; `wait` then raises unless it was published already."""
        self._progress.cancelled.set()

    @property
    def progress(self) -> int:
        """Grows as long as the save goes on; a save whose progress stands still is stuck in its storage."""
        return self._progress.count

    def _run(self) -> None:
        try:
            self._work(self._progress)
        except PretrainError as error:
            self._error = error
        except Exception as error:  # a thread's traceback would be lost
            self._error = StoreError(f"saving {self.name} failed: {error!r}. This is not foreseen; please report it.")


@dataclass(frozen=True)
class _Job:
    """What the thread needs, all taken before the loop goes on."""

    store: Store  # the checkpoint's own folder
    name: str
    rank: int
    save_id: str
    manifest: Manifest  # without files
    ranges: tuple[tuple[int, int, int], ...]
    keys: tuple[str, ...]
    copy: HostCopy
    idle: list[HostCopy]  # where the copy goes back to
    guard: Callable[[], None]
    ranks: int
    patience_s: float


def save(
    store: Store,
    engine: Stateful,
    *,
    step: int,
    attempt: int,
    training_state: dict[str, Any],
    world: World,
    guard: Callable[[], None],
    origin: dict[str, Any] | None = None,
    patience_s: float = 600.0,
) -> SaveHandle:
    """Begins to save the state at a step boundary. A collective; wait for the save before, first.

    Args:
        store: of the run's checkpoints.
        training_state: JSON, equal on all ranks.
        guard: called on rank 0 right before publishing; raises when this attempt lost the run.
        origin: facts for the record, for example the config's sha256.
        patience_s: how long rank 0 waits for the other ranks' files.
    """
    started = time.perf_counter()
    save_id = gather_texts(secrets.token_hex(8) if world.is_main else "")[0]
    name = checkpoint_name(step, attempt)
    shapes, spec = engine.shapes(), engine.optimizer_spec()
    scalars = engine.optimizer_scalars()
    fragments = engine.fragments()
    # Before its first step an optimizer has no state, and none is written.
    keys = (MASTER, *(key for key in spec.element_keys if all(key in f.tensors for f in fragments)))
    index = {parameter: position for position, parameter in enumerate(shapes)}
    manifest = Manifest(
        step=step,
        attempt=attempt,
        save_id=save_id,
        parameters=shapes,
        optimizer={
            "kind": spec.kind, "element_keys": list(keys[1:]), "scalars": scalars,
            "hyperparameters": engine.hyperparameters(),
        },
        training_state=training_state,
        origin={"ranks": world.size, "torch": torch.__version__, "python": platform.python_version(), **(origin or {})},
        files=(),
    )  # fmt: skip
    idle = _idle_copies.setdefault(engine, [])
    copy = idle.pop() if idle else HostCopy()
    copy.take(fragments, keys, {"format": "pt", "checkpoint": name, "rank": str(world.rank), "save_id": save_id})
    ranges = tuple((index[f.name], f.start, f.length) for f in fragments)
    job = _Job(
        store.child(name), name, world.rank, save_id, manifest, ranges, keys, copy, idle, guard, world.size, patience_s
    )  # fmt: skip
    return SaveHandle(name, time.perf_counter() - started, lambda progress: _write(job, progress))


def _write(job: _Job, progress: SaveProgress) -> None:
    """The thread: own file, sidecar, and on rank 0 the manifest."""
    try:
        entry = _write_own_file(job, progress)
        if job.rank:
            return
        files = [entry, *_others(job, progress)]
        data = Manifest(**{**_fields(job.manifest), "files": tuple(files)}).encode()
        job.guard()
        job.store.put(MANIFEST, data)
    except FencedError:
        raise  # the run belongs to another attempt: touch nothing
    except PretrainError as error:
        _clean_up(job, error)
        raise
    finally:
        if not job.idle:
            job.idle.append(job.copy)


def _write_own_file(job: _Job, progress: SaveProgress) -> FileEntry:
    digest = hashlib.sha256()

    def hashed() -> Iterator[memoryview]:
        for chunk in job.copy.chunks():
            digest.update(chunk)
            yield chunk
            progress.count += 1

    written = job.store.put_stream(rank_file(job.rank), hashed())
    entry = FileEntry(rank_file(job.rank), written, digest.hexdigest(), job.save_id, job.keys, job.ranges)
    job.store.put(sidecar_file(job.rank), encode_record(entry.to_json()))
    return entry


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
        progress.count += 1
        if progress.cancelled.wait(pause) or time.monotonic() > deadline:
            missing = [rank for rank in range(1, job.ranks) if rank not in entries]
            raise StoreError(
                f"{job.name} was not published: ranks {missing} did not write their files "
                f"within {job.patience_s:g} s. Look into their logs."
            )
        pause = min(2 * pause, _POLL_S[1])
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
    if job.rank:
        with suppress(PretrainError):
            told = {"save_id": job.save_id, "error": str(error)}
            job.store.put(failure_file(job.rank), json.dumps(told).encode())


def _fields(manifest: Manifest) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in Manifest.__slots__}
