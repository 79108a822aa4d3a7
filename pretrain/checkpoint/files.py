"""Reading a checkpoint's files: slices by header offsets, and hashes of whole files.

takes -> a checkpoint's store and manifest; gives -> tensors of any range of any parameter and key.
Local files are mapped (only touched pages are read), remote ones are read by range. Nothing here
trusts a file: the caller verifies before it uses what it read.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Iterator
from types import TracebackType

import torch

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

CHUNK_BYTES = 8 * 2**20
_MAX_HEADER_BYTES = 2**30


class CheckpointFiles:
    """Open files of one checkpoint; a context manager."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        """`store` is the checkpoint's own folder."""
        self._store, self._manifest = store, manifest
        self._names = list(manifest.parameters)
        self._headers: dict[str, dict[str, TensorSlot]] = {}
        self._maps: dict[str, mmap.mmap] = {}
        self._pieces: dict[str, list[tuple[int, int, FileEntry]]] = {name: [] for name in self._names}
        for file in manifest.files:
            for index, start, count in file.ranges:
                self._pieces[self._names[index]].append((start, count, file))

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Tensors over a mapping may still live; then the mapping ends with the last of them.
        self._maps.clear()

    def fill(self, target: torch.Tensor, key: str, parameter: str, start: int) -> None:
        """Copies elements start <= i < start + len(target) of the parameter's `key` into a 1-D tensor.

        Raises:
            CheckpointError: the files do not hold that range.
            StoreError: a read failed.
        """
        end, copied = start + target.numel(), 0
        for first, count, file in self._pieces.get(parameter, []):
            low, high = max(first, start), min(first + count, end)
            if low < high:
                source = self._slice(file, tensor_name(key, parameter), low - first, high - low)
                target[low - start : high - start].copy_(source)
                copied += high - low
        if copied != target.numel():
            raise CheckpointError(
                f"{self._store.url} holds {copied} of {target.numel()} elements of {parameter} ({key}). "
                "A checkpoint covers every element once. Use another checkpoint."
            )

    def _slice(self, file: FileEntry, name: str, offset: int, count: int) -> torch.Tensor:
        slot = self._header(file).get(name)
        if slot is None or offset + count > slot.count:
            raise CheckpointError(
                f"{self._store.url}/{file.name} lacks {name} elements {offset} to {offset + count}. "
                "The manifest says that it holds them. Use another checkpoint."
            )
        start = slot.start + offset * slot.dtype.itemsize
        mapped = self._mapped(file)
        if mapped is not None:
            return torch.frombuffer(mapped, dtype=slot.dtype, count=count, offset=start)
        data = self._store.get_range(file.name, start, count * slot.dtype.itemsize)
        return torch.frombuffer(bytearray(data), dtype=slot.dtype)

    def _header(self, file: FileEntry) -> dict[str, TensorSlot]:
        if file.name not in self._headers:
            where = f"{self._store.url}/{file.name}"
            (length,) = struct.unpack("<Q", self._store.get_range(file.name, 0, 8))
            if length > min(_MAX_HEADER_BYTES, file.bytes):
                raise CheckpointError(
                    f"{where} is no safetensors file (header of {length} bytes). Use another checkpoint."
                )
            self._headers[file.name] = parse_safetensors_header(self._store.get_range(file.name, 8, length), where)
        return self._headers[file.name]

    def _mapped(self, file: FileEntry) -> mmap.mmap | None:
        if file.name not in self._maps:
            path = self._store.local_path(file.name)
            if path is None:
                return None
            try:
                with open(path, "rb") as handle:
                    # Private pages: torch wants a writable buffer, nothing is ever written back.
                    self._maps[file.name] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise StoreError(f"cannot map {path}: {error}. Check that the file is there and readable.") from None
        return self._maps[file.name]


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


def content_problem(store: Store, name: str, file: FileEntry) -> str | None:
    """What is wrong with a file; reads and hashes all of it."""
    problem = size_problem(store, name, file)
    if problem:
        return problem
    digest = hashlib.sha256()
    try:
        for chunk in _chunks(store, f"{name}/{file.name}", file.bytes):
            digest.update(chunk)
    except StoreError as error:
        return f"{file.name} cannot be read: {error}"
    return None if digest.hexdigest() == file.sha256 else f"{file.name} does not match its sha256: its bytes changed"


def _chunks(store: Store, key: str, size: int) -> Iterator[bytes]:
    path = store.local_path(key)
    if path is None:
        for start in range(0, size, CHUNK_BYTES):
            yield store.get_range(key, start, min(CHUNK_BYTES, size - start))
        return
    try:
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from None
