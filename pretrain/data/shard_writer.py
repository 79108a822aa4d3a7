"""Writes a source directory: blocks -> shards with index -> manifest. The only place that writes shard files.

Takes blocks in order, one `add` each -> gives the finished `Manifest`, written last.
Invariants: the same blocks give the same bytes (fixed tar headers); every id is below the
vocabulary; memory is one block plus the index of the open shard; files are fsynced when closed.
A directory without a manifest is not a source, so a crash leaves nothing that could be read.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import numpy as np

from pretrain.data.format import (
    INDEX_SUFFIX,
    MANIFEST_NAME,
    Manifest,
    ShardEntry,
    ShardIndex,
    shard_name,
)
from pretrain.errors import DataError, StoreError

_TAR_BLOCK = 512


def ustar_header(name: str, size: int) -> bytes:
    """A 512-byte ustar header of a regular file that depends on nothing but name and size."""
    header = bytearray(_TAR_BLOCK)
    header[0 : len(name)] = name.encode("ascii")
    header[100:108] = b"0000644\0"
    header[108:116] = header[116:124] = b"0000000\0"
    header[124:136] = b"%011o\0" % size
    header[136:148] = b"00000000000\0"
    header[148:156] = b" " * 8
    header[156:157] = b"0"
    header[257:265] = b"ustar\x0000"
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """What a block adds to the manifest's sums. `documents` and `text_bytes` count those ending in it."""

    documents: int
    tokens: int
    source_tokens: int
    text_bytes: int


class ShardWriter:
    """One shard: the tar and its index."""

    def __init__(self, directory: Path, number: int, members: tuple[str, ...]) -> None:
        self.name = shard_name(number)
        self._path = directory / self.name
        self._members = members
        self._file = self._path.open("xb")
        self._hash = hashlib.sha256()
        self._offset = 0
        self._rows: list[list[int]] = []
        self._sums = np.zeros(4, dtype=np.int64)

    @property
    def blocks(self) -> int:
        return len(self._rows)

    def add(self, block: int, payloads: Sequence[bytes | memoryview], counts: BlockCounts) -> None:
        """Appends one block's members, in the order of the format."""
        row = [block, counts.tokens]
        for suffix, payload in zip(self._members, payloads, strict=True):
            size = len(payload)
            self._write(ustar_header(f"{block:08d}.{suffix}", size))
            row += [self._offset, size, zlib.crc32(payload)]
            self._write(payload)
            self._write(bytes(-size % _TAR_BLOCK))
        self._rows.append(row)
        self._sums += (counts.documents, counts.tokens, counts.source_tokens, counts.text_bytes)

    def close(self) -> ShardEntry:
        """Ends the tar, writes the index, makes both durable."""
        self._write(bytes(2 * _TAR_BLOCK))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        index = ShardIndex(np.array(self._rows, dtype=np.int64), self._members).to_bytes()
        write_durably(self._path.with_name(self.name + INDEX_SUFFIX), index)
        documents, tokens, source_tokens, text_bytes = (int(value) for value in self._sums)
        return ShardEntry(
            name=self.name,
            bytes=self._offset,
            sha256=self._hash.hexdigest(),
            index_sha256=hashlib.sha256(index).hexdigest(),
            blocks=self.blocks,
            documents=documents,
            tokens=tokens,
            source_tokens=source_tokens,
            text_bytes=text_bytes,
        )

    def abandon(self) -> None:
        self._file.close()

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._offset += len(data)


class SourceWriter:
    """A whole source: rolls over to the next shard every `shard_blocks` blocks, publishes the manifest last.

    Args:
        directory: is created; must not hold a source yet.
        header: a manifest without counts and shards (their values are ignored).

    Use as a context manager: leaving it by an exception closes the files and writes no manifest.
    """

    def __init__(self, directory: Path, header: Manifest, *, shard_blocks: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._header = header
        self._shard_blocks = shard_blocks
        self._shards: list[ShardEntry] = []
        self._open: ShardWriter | None = None
        self._blocks = 0

    def add(self, arrays: Sequence[np.ndarray], provenance: bytes, counts: BlockCounts) -> None:
        """Appends one block: its arrays in the order of `Manifest.members`, then the provenance JSON.

        Raises:
            DataError: an array has the wrong length, or an id is outside the vocabulary.
            StoreError: the disk is full or not writable.
        """
        payloads: list[bytes | memoryview] = [*self._checked(arrays), provenance]
        try:
            if self._open is None:
                self._open = ShardWriter(self._directory, len(self._shards), self._header.members)
            self._open.add(self._blocks, payloads, counts)
            self._blocks += 1
            if self._open.blocks == self._shard_blocks:
                self._close_shard()
        except OSError as error:
            raise _cannot_write(self._directory, error) from error

    def close(self) -> Manifest:
        """Closes the last shard and publishes the manifest.

        Raises:
            DataError: no block was added.
            StoreError: the disk is full or not writable.
        """
        if not self._blocks:
            raise DataError(f"{self._directory} would be a source without a block. Give text to build from.")
        try:
            self._close_shard()
            manifest = self._summed()
            write_durably(self._directory / MANIFEST_NAME, manifest.to_json())
            fsync_directory(self._directory)
        except OSError as error:
            raise _cannot_write(self._directory, error) from error
        return manifest

    def __enter__(self) -> SourceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is not None:
            self._open.abandon()

    def _close_shard(self) -> None:
        if self._open is not None:
            self._shards.append(self._open.close())
            self._open = None

    def _summed(self) -> Manifest:
        shards = tuple(self._shards)
        manifest = replace(
            self._header,
            blocks=sum(shard.blocks for shard in shards),
            documents=sum(shard.documents for shard in shards),
            tokens=sum(shard.tokens for shard in shards),
            source_tokens=sum(shard.source_tokens for shard in shards),
            text_bytes=sum(shard.text_bytes for shard in shards),
            shards=shards,
        )
        return replace(manifest, sha256=manifest.computed_sha256())

    def _checked(self, arrays: Sequence[np.ndarray]) -> list[memoryview]:
        """The arrays as little-endian bytes. Data members alternate ids, ends, (ids, ends)."""
        header = self._header
        if header.kind == "tokens":
            sizes = [header.block_tokens + 1]
        else:
            sizes = [
                header.rows_per_block * header.source_capacity,
                header.rows_per_block * header.target_capacity,
            ]
        payloads = []
        for position, (ids, ends) in enumerate(zip(arrays[0::2], arrays[1::2], strict=True)):
            if ids.shape != (sizes[position],):
                raise DataError(f"block {self._blocks} has {ids.shape} ids, the layout says {sizes[position]}.")
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= header.vocabulary_size:
                raise DataError(
                    f"token id {low if low < 0 else high} is outside the vocabulary. Ids of source {header.name} lie "
                    f"in 0..{header.vocabulary_size - 1}. Build with the tokenizer that made the ids."
                )
            payloads.append(memoryview(ids.astype(f"<{header.dtype}").tobytes()))
            payloads.append(memoryview(ends.astype("<u4").tobytes()))
        return payloads


def write_durably(path: Path, data: bytes) -> None:
    """Writes a small file and waits until it is on disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cannot_write(directory: Path, error: OSError) -> StoreError:
    return StoreError(
        f"cannot write {error.filename or directory}: {error.strerror}. Free space or choose another --out."
    )
