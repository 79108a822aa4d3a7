"""Sorting more text than fits in memory: documents go to bucket files by order key, a bucket is sorted alone.

Takes documents in reading order -> gives buckets whose concatenation, each sorted, is the shuffled
corpus. The number of buckets changes nothing but memory. Private files of one build, removed at its end.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_HEADER = struct.Struct("<16s16sQQ?IIIIi")  # order, identity, ordinal, line, validation, lengths (target -1: none)
_BUFFER_BYTES = 64 * 2**20
BUCKET_BYTES = 16 * 2**20
_MIN_BUCKETS, _MAX_BUCKETS = 32, 4096


class Spilled(NamedTuple):
    """One document on its way through a bucket. The first three fields sort it."""

    order: bytes
    identity: bytes
    ordinal: int
    line: int
    validation: bool
    id: str
    origin: str
    text: bytes
    target: bytes | None
    metadata: bytes = b""  # JSON, empty if there is none


def num_buckets_for(expected_bytes: int) -> int:
    """A power of two, so that a bucket holds about `BUCKET_BYTES`."""
    wanted = max(1, expected_bytes // BUCKET_BYTES)
    return min(max(1 << (wanted - 1).bit_length(), _MIN_BUCKETS), _MAX_BUCKETS)


class Spill:
    """Appends documents to buckets; files are open only while a buffer is flushed."""

    def __init__(self, directory: Path, num_buckets: int) -> None:
        directory.mkdir(parents=True)
        self._shift = 16 - (num_buckets.bit_length() - 1)
        self._paths = [directory / f"{number:04d}.spill" for number in range(num_buckets)]
        self._buffers: list[list[bytes]] = [[] for _ in range(num_buckets)]
        self._sizes = [0] * num_buckets
        self._limit = max(_BUFFER_BYTES // num_buckets, 2**16)

    def add(self, document: Spilled) -> None:
        """Puts one document into its bucket."""
        bucket = int.from_bytes(document.order[:2], "big") >> self._shift
        name, origin = document.id.encode(), document.origin.encode("utf-8", "surrogateescape")
        target = document.target
        texts = (name, origin, document.metadata, document.text)
        header = _HEADER.pack(*document[:5], *map(len, texts), -1 if target is None else len(target))
        parts = (header, *texts, target or b"")
        self._buffers[bucket] += parts
        self._sizes[bucket] += sum(map(len, parts))
        if self._sizes[bucket] >= self._limit:
            self._flush(bucket)

    def close(self) -> list[Path]:
        """Writes what is buffered -> the paths of the buckets that hold anything, in order."""
        for bucket in range(len(self._paths)):
            self._flush(bucket)
        return [path for path in self._paths if path.exists()]

    def _flush(self, bucket: int) -> None:
        if self._buffers[bucket]:
            with self._paths[bucket].open("ab") as file:
                file.write(b"".join(self._buffers[bucket]))
        self._buffers[bucket] = []
        self._sizes[bucket] = 0


def read_sorted(path: Path) -> list[Spilled]:
    """A bucket's documents in corpus order."""
    return sorted(_read(path.read_bytes()))


def _read(data: bytes) -> Iterator[Spilled]:
    position = 0
    while position < len(data):
        *head, target_length = _HEADER.unpack_from(data, position)
        fields = []
        position += _HEADER.size
        for length in (*head[5:], max(target_length, 0)):
            fields.append(data[position : position + length])
            position += length
        name, origin, metadata, text, target = fields
        order, identity, ordinal, line, validation = head[:5]
        yield Spilled(
            order=order,
            identity=identity,
            ordinal=ordinal,
            line=line,
            validation=validation,
            id=name.decode(),
            origin=origin.decode("utf-8", "surrogateescape"),
            text=text,
            target=None if target_length < 0 else target,
            metadata=metadata,
        )
