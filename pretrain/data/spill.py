"""Sorting more text than fits in memory: runs sorted by order key, and ranges of keys merged from all runs.

Takes documents in reading order -> `RunWriter` writes runs of about `run_bytes`, each sorted, with a
table of where every slot of keys begins -> `read_range` gives the documents of a range of slots, from all runs, in
corpus order. Runs are private files of one build.
Invariants: neither the size nor the number of runs changes what comes out; memory is a run while
writing and one range (or, for a range that is larger than its budget, a part of one) while reading.
Source: external merge sort by hash partitions, own.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

import numpy as np

from pretrain.store import Store

SLOTS = 4096  # ranges of the first 12 bits of the order key
RUN_BYTES = 64 * 2**20
RANGE_BYTES = 16 * 2**20
_TABLE_BYTES = 8 * (SLOTS + 1)
_READ_BYTES = 2**20
_PARTITIONS = 64
# order, identity, number of the file, place in it, validation; lengths: rest, text, target (-1: none)
_HEADER = struct.Struct(">16s16sIQ?IIi")
_KEY = 32  # bytes of order and identity: equal documents, unless duplicates are kept


class Spilled(NamedTuple):
    """One document on its way. The first four fields sort it.

    Attributes:
        order, identity: see `selection`.
        file: number of its file among all inputs.
        place: in the file, from 0.
        rest: its part of a block's JSON, see `format.provenance_rest`.
        target: the other side of a pair, or which parts of the text are trained (`trained_parts.pack_lengths`).
    """

    order: bytes
    identity: bytes
    file: int
    place: int
    validation: bool
    rest: bytes
    text: bytes
    target: bytes | None


@dataclass(frozen=True, slots=True)
class Run:
    """A written run: its key in the store and the bytes of its documents."""

    key: str
    bytes: int


class RunWriter:
    """Collects documents and writes them as runs `prefix-000.run`, `-001`, …"""

    def __init__(self, store: Store, prefix: str, run_bytes: int, *, deduplicate: bool) -> None:
        self._store, self._prefix, self._run_bytes = store, prefix, run_bytes
        self._deduplicate = deduplicate
        self._records: list[bytes] = []
        self._size = 0
        self.runs: list[Run] = []
        self.duplicates = self.duplicate_bytes = 0

    def add(self, document: Spilled) -> None:
        """Puts one document into the open run."""
        order, identity, file, place, validation, rest, text, target = document
        lengths = (len(rest), len(text), -1 if target is None else len(target))
        record = b"".join((_HEADER.pack(order, identity, file, place, validation, *lengths), rest, text, target or b""))
        self._records.append(record)
        self._size += len(record)
        if self._size >= self._run_bytes:
            self._write()

    def close(self) -> list[Run]:
        """Writes what is left -> all runs."""
        if self._records:
            self._write()
        return self.runs

    def _write(self) -> None:
        records = self._records
        records.sort()  # the header begins with what sorts, big-endian
        if self._deduplicate:
            kept = [one for place, one in enumerate(records) if not place or one[:_KEY] != records[place - 1][:_KEY]]
            self.duplicates += len(records) - len(kept)
            self.duplicate_bytes += _text_bytes(records) - _text_bytes(kept) if len(kept) < len(records) else 0
            records = kept
        sizes = np.zeros(SLOTS + 1, dtype="<i8")
        np.add.at(sizes, 1 + np.array([_slot(record) for record in records]), [len(record) for record in records])
        table = np.cumsum(sizes)
        run = Run(f"{self._prefix}-{len(self.runs):03d}.run", int(table[-1]))
        self._store.put_stream(run.key, [table.astype("<i8").tobytes(), *_joined(records)])
        self.runs.append(run)
        self._records, self._size = [], 0


def slot_sizes(store: Store, runs: Iterable[Run]) -> np.ndarray:
    """int64 [SLOTS]: bytes of all runs in each slot."""
    total = np.zeros(SLOTS, dtype=np.int64)
    for run in runs:
        total += np.diff(np.frombuffer(store.get_range(run.key, 0, _TABLE_BYTES), dtype="<i8"))
    return total


def ranges_of(sizes: np.ndarray, range_bytes: int) -> list[tuple[int, int]]:
    """Neighbouring slots grouped into ranges [low, high) of at most `range_bytes`, or one slot; empty ones left out."""
    ranges: list[tuple[int, int]] = []
    low, size = 0, 0
    for slot in range(SLOTS + 1):
        here = int(sizes[slot]) if slot < SLOTS else 0
        if slot == SLOTS or (size and size + here > range_bytes):
            if size:
                ranges.append((low, slot))
            low, size = slot, 0
        if not size:
            low = slot
        size += here
    return ranges


def read_range(
    store: Store, runs: Iterable[Run], low: int, high: int, *, deduplicate: bool, budget_bytes: int
) -> Iterator[list[Spilled]]:
    """The documents of slots [low, high) in corpus order, as lists that fit the budget.

    Equal documents come as one, the first in reading order, unless they are kept. A single document and its
    like may exceed the budget.
    """
    slices = []
    for run in runs:
        start, stop = np.frombuffer(store.get_range(run.key, 8 * low, 8 * (high - low + 1)), dtype="<i8")[
            [0, -1]
        ].tolist()
        if stop > start:
            slices.append((run.key, _TABLE_BYTES + start, stop - start))
    total = sum(size for _, _, size in slices)
    pieces = (store.get_range(key, start, size) for key, start, size in slices)
    if total <= budget_bytes:
        yield _sorted((record for piece in pieces for record in _records_of(piece)), deduplicate)
    else:
        records = (record for key, start, size in slices for record in _streamed(store, key, start, size))
        yield from _partitioned(records, deduplicate, budget_bytes, depth=1)


def _partitioned(records: Iterator[bytes], deduplicate: bool, budget_bytes: int, depth: int) -> Iterator[list[Spilled]]:
    """Distributes records to temporary files by bits of the order key that the slots have not used, in key order."""
    with tempfile.TemporaryDirectory(prefix="pretrain-sort-") as folder:
        files: list[IO[bytes]] = [open(f"{folder}/{number}", "w+b") for number in range(_PARTITIONS)]  # noqa: SIM115
        try:
            for record in records:
                bits = int.from_bytes(record[:8], "big") >> (64 - 12 - 6 * depth)
                files[bits % _PARTITIONS].write(record)
            for file in files:
                size = file.tell()
                file.seek(0)
                if size <= budget_bytes or depth == 8:
                    yield _sorted(_records_in(file), deduplicate)
                else:
                    yield from _partitioned(
                        _distinct(_records_in(file), deduplicate), deduplicate, budget_bytes, depth + 1
                    )
                file.truncate(0)
        finally:
            for file in files:
                file.close()


def _sorted(records: Iterable[bytes], deduplicate: bool) -> list[Spilled]:
    if not deduplicate:
        return [_parse(record) for record in sorted(records)]
    first: dict[bytes, bytes] = {}
    for record in records:
        key = record[:_KEY]
        if key not in first or record < first[key]:
            first[key] = record
    return [_parse(record) for record in sorted(first.values())]


def _distinct(records: Iterator[bytes], deduplicate: bool) -> Iterator[bytes]:
    """Leaves out neighbours that are equal: a pile of one document must not be carried down."""
    before = b""
    for record in records:
        if not deduplicate or record[:_KEY] != before:
            yield record
        before = record[:_KEY]


def _slot(record: bytes) -> int:
    return (record[0] << 4) | (record[1] >> 4)


def _joined(records: list[bytes]) -> Iterator[bytes]:
    """In pieces, so that a run is not in memory twice."""
    for start in range(0, len(records), 4096):
        yield b"".join(records[start : start + 4096])


def _record_bytes(header: tuple[Any, ...]) -> int:
    return _HEADER.size + int(header[5]) + int(header[6]) + max(int(header[7]), 0)


def _text_bytes(records: list[bytes]) -> int:
    headers = [_HEADER.unpack_from(record) for record in records]
    return sum(int(header[6]) + max(int(header[7]), 0) for header in headers)


def _records_of(data: bytes) -> Iterator[bytes]:
    position = 0
    while position < len(data):
        end = position + _record_bytes(_HEADER.unpack_from(data, position))
        yield data[position:end]
        position = end


def _streamed(store: Store, key: str, start: int, size: int) -> Iterator[bytes]:
    """The records of a slice of a run, a piece at a time."""
    rest = b""
    for offset in range(0, size, _READ_BYTES):
        data = rest + store.get_range(key, start + offset, min(_READ_BYTES, size - offset))
        position = 0
        while position + _HEADER.size <= len(data):
            end = position + _record_bytes(_HEADER.unpack_from(data, position))
            if end > len(data):
                break
            yield data[position:end]
            position = end
        rest = data[position:]


def _records_in(file: IO[bytes]) -> Iterator[bytes]:
    while head := file.read(_HEADER.size):
        yield head + file.read(_record_bytes(_HEADER.unpack(head)) - _HEADER.size)


def _parse(record: bytes) -> Spilled:
    order, identity, file, place, validation, rest, text, target = _HEADER.unpack_from(record)
    at = _HEADER.size
    return Spilled(
        order,
        identity,
        file,
        place,
        validation,
        record[at : at + rest],
        record[at + rest : at + rest + text],
        None if target < 0 else record[at + rest + text :],
    )
