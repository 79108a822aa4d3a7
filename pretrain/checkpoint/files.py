"""Reading a checkpoint's files: any range of any parameter and key, checked piece by piece.

takes -> a checkpoint's store and manifest; gives -> filled tensors. Every piece of a file (8 MiB, with a
checksum of its own) that holds something wanted is read once, checked, and only then copied from; so what
was checked is what is used, and nothing is read that nobody needs. Several threads read at once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from pretrain.checkpoint.digests import chunk_bounds, digest
from pretrain.checkpoint.format import (
    MANIFEST,
    FileEntry,
    Manifest,
    TensorSlot,
    parse_safetensors_header,
    tensor_name,
)
from pretrain.errors import CheckpointError, StoreError
from pretrain.store import NotFoundError, Store

_MAX_HEADER_BYTES = 2**30


@runtime_checkable
class Ranges(Protocol):
    """A place that files are read from: a store, or a peer's memory."""

    url: str

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`. Raises StoreError."""
        ...


Sources = Callable[[str], Sequence[Ranges]]  # name of a file -> the places that hold it, the preferred one first


def only_in(store: Ranges) -> Sources:
    """All files lie in one place."""
    return lambda file: (store,)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements of a file that go to a tensor: byte range [start, stop) of the file, their type, where they go."""

    start: int
    stop: int
    dtype: torch.dtype
    target: torch.Tensor


class CheckpointFiles:
    """Reads ranges of a checkpoint, each piece of a file once, and checks every piece before a byte of it is used.

    `notes` tells what was unusual.
    """

    def __init__(
        self, sources: Sources, manifest: Manifest, threads: int = 1, progress: Callable[[], None] = lambda: None
    ) -> None:
        """
        Args:
            sources: of the checkpoint's own folder.
            progress: called for each piece that was read, by the thread that waits for all of them.
        """
        self._progress = progress
        self._sources, self._threads, self._name = sources, threads, manifest.name
        self._names = list(manifest.parameters)
        self._headers: dict[str, dict[str, TensorSlot]] = {}
        self._ranges: dict[str, list[tuple[int, int, FileEntry]]] = {name: [] for name in self._names}
        self._planned: dict[str, tuple[FileEntry, list[_Piece]]] = {}
        self._converted: set[tuple[str, str, str]] = set()
        self._wrong: list[str] = []
        for file in manifest.files:
            for index, start, count in file.ranges:
                self._ranges[self._names[index]].append((start, count, file))

    def plan(self, target: torch.Tensor, key: str, parameter: str, start: int) -> None:
        """Elements start <= i < start + len(target) of the parameter's `key` are to go into a 1-D tensor.

        Raises:
            CheckpointError: the files do not hold that range, or a file's header is damaged.
            StoreError: a header cannot be read.
        """
        end, found = start + target.numel(), 0
        for first, count, file in self._ranges.get(parameter, []):
            low, high = max(first, start), min(first + count, end)
            if low < high:
                slot = self._slot(file, tensor_name(key, parameter), high - first)
                begin = slot.start + (low - first) * slot.dtype.itemsize
                piece = _Piece(
                    begin, begin + (high - low) * slot.dtype.itemsize, slot.dtype, target[low - start : high - start]
                )
                self._planned.setdefault(file.name, (file, []))[1].append(piece)
                found += high - low
                if slot.dtype != target.dtype:
                    self._converted.add((key, _short(slot.dtype), _short(target.dtype)))
        if found != target.numel():
            raise CheckpointError(
                f"{self._name} holds {found} of {target.numel()} elements of {parameter} ({key}). "
                "A checkpoint covers every element once. Use another checkpoint."
            )

    def dtype(self, key: str, parameter: str) -> torch.dtype:
        """In which type the files hold a parameter's `key`. Raises CheckpointError when they do not."""
        for _, count, file in self._ranges.get(parameter, []):
            return self._slot(file, tensor_name(key, parameter), count).dtype
        return torch.float32  # a parameter without elements

    def read(self) -> None:
        """Fills all targets, several pieces at once; memory for one piece per thread.

        Raises:
            CheckpointError: bytes are not as they were written; targets may hold a part.
            StoreError: a read failed.
        """
        self._work(self._load)
        self._planned.clear()

    def check(self) -> None:
        """Looks at all that was planned without using it. Raises what `read` does."""
        self._work(lambda file, number, pieces: self._verified(file, number))

    def _work(self, action: Callable[[FileEntry, int, list[_Piece]], object]) -> None:
        work = [
            (file, number, wanted)
            for file, pieces in self._planned.values()
            for number, wanted in _by_chunk(pieces, file.chunk_bytes)
        ]
        with ThreadPoolExecutor(self._threads, thread_name_prefix="restore") as pool:
            for _ in pool.map(lambda item: action(*item), work):
                self._progress()

    def notes(self) -> list[str]:
        """State that was read into another type, and pieces that were only right when they were read again."""
        converted = [f"{key} was saved as {saved} and is {now} from here on" for key, saved, now in self._converted]
        again = [f"{where} was not as written; a second look found it right" for where in self._wrong]
        return [*sorted(converted), *again]

    def fill(self, target: torch.Tensor, key: str, parameter: str, start: int) -> None:
        """`plan` and `read` in one."""
        self.plan(target, key, parameter, start)
        self.read()

    def _load(self, file: FileEntry, number: int, pieces: list[_Piece]) -> None:
        data, start = self._verified(file, number), number * file.chunk_bytes
        for piece in pieces:
            low, high = max(piece.start, start), min(piece.stop, start + len(data))
            width = piece.dtype.itemsize
            values = torch.frombuffer(data, dtype=piece.dtype, count=(high - low) // width, offset=low - start)
            first = (low - piece.start) // width
            piece.target[first : first + values.numel()].copy_(values)

    def _verified(self, file: FileEntry, number: int) -> bytearray:
        """A piece as it was written; where it is not, the next place is asked, or the only one again.

        A second look costs little, and a transfer may be to blame.
        """
        start = number * file.chunk_bytes
        size = min(file.chunk_bytes, file.bytes - start)
        places = list(self._sources(file.name))
        failure: StoreError | None = None
        for place in places if len(places) > 1 else 2 * places:
            try:
                data = bytearray(place.get_range(file.name, start, size))
            except StoreError as error:
                if len(places) == 1:
                    raise
                failure = failure or error
                continue
            if digest(data) == file.digests[number]:
                return data
            self._wrong.append(f"{place.url}/{file.name} between {start} and {start + size}")
        if failure is not None:
            raise failure
        raise DamagedError(
            f"{file.name} does not match its sha256: its bytes changed between {start} and {start + size}"
        )

    def _slot(self, file: FileEntry, name: str, count: int) -> TensorSlot:
        slot = self._header(file).get(name)
        if slot is None or count > slot.count:
            raise CheckpointError(
                f"{self._name}/{file.name} lacks {name} up to element {count}. "
                "The manifest says that it holds them. Use another checkpoint."
            )
        return slot

    def _header(self, file: FileEntry) -> dict[str, TensorSlot]:
        if file.name not in self._headers:
            where = f"{self._name}/{file.name}"
            data = self._verified(file, 0)
            (length,) = struct.unpack("<Q", data[:8].ljust(8, b"\0"))
            if length > min(_MAX_HEADER_BYTES, file.bytes):
                raise CheckpointError(
                    f"{where} is no safetensors file (header of {length} bytes). Use another checkpoint."
                )
            for number in range(1, -(-(8 + length) // file.chunk_bytes)):
                data += self._verified(file, number)
            self._headers[file.name] = parse_safetensors_header(bytes(data[8 : 8 + length]), where)
        return self._headers[file.name]


def _by_chunk(pieces: list[_Piece], chunk_bytes: int) -> Iterator[tuple[int, list[_Piece]]]:
    wanted: dict[int, list[_Piece]] = {}
    for piece in pieces:
        for number in range(piece.start // chunk_bytes, -(-piece.stop // chunk_bytes)):
            wanted.setdefault(number, []).append(piece)
    yield from sorted(wanted.items(), key=lambda item: item[0])


class DamagedError(CheckpointError):
    """Bytes of a file are not those that were written."""


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_manifest(store: Store, name: str) -> Manifest:
    """Manifest of a checkpoint; `store` holds the checkpoints of a run.

    Raises:
        NotFoundError: there is none: the checkpoint was never published.
        CheckpointError: it is damaged, or belongs to another checkpoint.
    """
    key = f"{name}/{MANIFEST}"
    manifest = Manifest.decode(store.get(key), f"{store.url}/{key}")
    if manifest.name != name:
        raise CheckpointError(
            f"{store.url}/{key} is the manifest of {manifest.name}. A checkpoint's folder bears its name. Rename it."
        )
    return manifest


def size_problem(store: Store, name: str, file: FileEntry) -> str | None:
    """What is wrong with a file's size, which costs no reading."""
    try:
        size = store.size(f"{name}/{file.name}")
    except NotFoundError:
        return f"{file.name} is missing"
    except StoreError as error:
        return f"{file.name} cannot be looked at: {error}"
    return None if size == file.bytes else f"{file.name} has {size} bytes instead of {file.bytes}"


def content_problem(store: Store, name: str, file: FileEntry, threads: int = 1) -> str | None:
    """What is wrong with a file; reads and hashes all of it, several pieces at once."""
    problem = size_problem(store, name, file)
    if problem:
        return problem
    key, bounds = f"{name}/{file.name}", chunk_bounds(file.bytes, file.chunk_bytes)

    def is_good(number: int) -> bool:
        start, stop = bounds[number]
        return digest(store.get_range(key, start, stop - start)) == file.digests[number]

    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
            wrong = [number for number, good in enumerate(pool.map(is_good, range(len(bounds)))) if not good]
    except StoreError as error:
        return f"{file.name} cannot be read: {error}"
    if not wrong:
        return None
    start, stop = bounds[wrong[0]]
    more = f" and {len(wrong) - 1} more places" if wrong[1:] else ""
    return f"{file.name} does not match its sha256: its bytes changed between {start} and {stop}{more}"
