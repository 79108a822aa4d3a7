"""Writes a source directory: blocks -> shards with index -> manifest. The only place that writes shard files.

Takes blocks in order, one `add` each -> gives the finished `Manifest`, written last.
Invariants: the same blocks give the same bytes (fixed tar headers); every id is below the
vocabulary; memory is one block plus the index of the open shard; files are fsynced when closed.
A directory without a manifest is not a source, so a crash leaves nothing that could be read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from pretrain.data.checksum import crc32
from pretrain.data.format import (
    INDEX_SUFFIX,
    MANIFEST_NAME,
    Manifest,
    ShardIndex,
    shard_name,
)
from pretrain.data.shard_entries import ShardEntry
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


class ShardBytes:
    """One shard as the bytes of its tar, in pieces to be written one after the other, and its index.

    Args:
        number: of the shard.
        header: the manifest of the source; its counts and shards are ignored.
    """

    def __init__(self, number: int, header: Manifest) -> None:
        self.name = shard_name(number)
        self._header = header
        self._hash = hashlib.sha256()
        self._offset = 0
        self._rows: list[list[int]] = []
        self._sums = np.zeros(4, dtype=np.int64)

    @property
    def blocks(self) -> int:
        return len(self._rows)

    def add(
        self, block: int, arrays: Sequence[np.ndarray], provenance: bytes, counts: BlockCounts
    ) -> Iterator[bytes | memoryview]:
        """The bytes of one block's members: arrays in the order of the format, then the provenance.

        Raises:
            DataError: an array has the wrong length, or an id is outside the vocabulary.
        """
        payloads: list[bytes | memoryview] = [*_checked(block, arrays, self._header), provenance]
        row = [block, counts.tokens]
        for suffix, payload in zip(self._header.members, payloads, strict=True):
            size = len(payload)
            yield self._counted(ustar_header(f"{block:08d}.{suffix}", size))
            row += [self._offset, size, crc32(payload)]
            yield self._counted(payload)
            yield self._counted(bytes(-size % _TAR_BLOCK))
        self._rows.append(row)
        self._sums += (counts.documents, counts.tokens, counts.source_tokens, counts.text_bytes)

    def end(self) -> bytes:
        """The end of the tar."""
        return bytes(self._counted(bytes(2 * _TAR_BLOCK)))

    def index(self) -> bytes:
        """The bytes of the `.idx`."""
        return ShardIndex(np.array(self._rows, dtype=np.int64), self._header.members).to_bytes()

    def entry(self) -> ShardEntry:
        """The shard's line in the manifest, after `end`."""
        documents, tokens, source_tokens, text_bytes = (int(value) for value in self._sums)
        return ShardEntry(
            name=self.name,
            bytes=self._offset,
            sha256=self._hash.hexdigest(),
            index_sha256=hashlib.sha256(self.index()).hexdigest(),
            blocks=self.blocks,
            documents=documents,
            tokens=tokens,
            source_tokens=source_tokens,
            text_bytes=text_bytes,
        )

    def _counted(self, data: bytes | memoryview) -> bytes | memoryview:
        self._hash.update(data)
        self._offset += len(data)
        return data


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
        self._open: ShardBytes | None = None
        self._file: IO[bytes] | None = None
        self._blocks = 0

    def add(self, arrays: Sequence[np.ndarray], provenance: bytes, counts: BlockCounts) -> None:
        """Appends one block: its arrays in the order of `Manifest.members`, then the provenance JSON.

        Raises:
            DataError: an array has the wrong length, or an id is outside the vocabulary.
            StoreError: the disk is full or not writable.
        """
        try:
            if self._open is None or self._file is None:
                self._open = ShardBytes(len(self._shards), self._header)
                self._file = (self._directory / self._open.name).open("xb")
            for piece in self._open.add(self._blocks, arrays, provenance, counts):
                self._file.write(piece)
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
            manifest = summed_manifest(self._header, self._shards)
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
        if self._file is not None:
            self._file.close()

    def _close_shard(self) -> None:
        if self._open is not None and self._file is not None:
            self._file.write(self._open.end())
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            write_durably(self._directory / (self._open.name + INDEX_SUFFIX), self._open.index())
            self._shards.append(self._open.entry())
            self._open = self._file = None


def summed_manifest(header: Manifest, shards: Sequence[ShardEntry]) -> Manifest:
    """The header with its shards, their sums, and its sha256."""
    blocks = sum(shard.blocks for shard in shards)
    tokens, source_tokens = sum(shard.tokens for shard in shards), sum(shard.source_tokens for shard in shards)
    manifest = replace(
        header,
        blocks=blocks,
        documents=sum(shard.documents for shard in shards),
        tokens=tokens,
        source_tokens=source_tokens,
        text_bytes=sum(shard.text_bytes for shard in shards),
        fill_fraction=round((tokens + source_tokens) / (blocks * header.block_slots), 6),
        shards=tuple(shards),
    )
    return replace(manifest, sha256=manifest.computed_sha256())


def _checked(block: int, arrays: Sequence[np.ndarray], header: Manifest) -> list[memoryview]:
    """The arrays as little-endian bytes. Data members alternate ids, ends, (ids, ends); a mask comes behind them."""
    if header.kind == "tokens":
        sizes = [header.block_tokens + 1]
    else:
        sizes = [header.rows_per_block * header.source_capacity, header.rows_per_block * header.target_capacity]
    payloads = []
    arrays, mask = (arrays[:-1], arrays[-1]) if header.masked else (arrays, None)
    if mask is not None and (mask.shape != arrays[0].shape or int(mask.max()) > 1):
        raise DataError(f"block {block} has a mask of {mask.shape} up to {int(mask.max())} for {arrays[0].shape} ids.")
    for position, (ids, ends) in enumerate(zip(arrays[0::2], arrays[1::2], strict=True)):
        if ids.shape != (sizes[position],):
            raise DataError(f"block {block} has {ids.shape} ids, the layout says {sizes[position]}.")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= header.vocabulary_size:
            raise DataError(
                f"token id {low if low < 0 else high} is outside the vocabulary. Ids of source {header.name} lie "
                f"in 0..{header.vocabulary_size - 1}. Build with the tokenizer that made the ids."
            )
        payloads.append(memoryview(ids.astype(f"<{header.dtype}").tobytes()))
        payloads.append(memoryview(ends.astype("<u4").tobytes()))
    if mask is not None:
        payloads.append(memoryview(mask.astype("u1").tobytes()))
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
