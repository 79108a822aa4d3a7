"""Checks every byte and every promise of a built source, and names each problem.

Takes the store of a source -> gives a `VerifyReport`; problems are found and listed, not raised.
Checked: sizes, sha256, tar headers, crc32 of members, ids below the vocabulary, document ends,
provenance, the token after each block, sums. Shards are checked side by side, and reported in their
order. Memory: one shard a thread. Source: own; independent of the reader, which checks only what it reads.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pretrain.data.checksum import crc32
from pretrain.data.format import INDEX_SUFFIX, Manifest, ShardIndex, decode_provenance, read_manifest
from pretrain.data.shard_writer import ustar_header
from pretrain.errors import DataError
from pretrain.store import NotFoundError, Store

_TAR_BLOCK = 512


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was looked at and what is wrong; good if `problems` is empty. `tokens` are those of both sides of pairs."""

    url: str
    sha256: str
    shards: int
    blocks: int
    documents: int
    tokens: int
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def verify_source(store: Store, *, threads: int | None = None) -> VerifyReport:
    """Reads and checks everything.

    Args:
        threads: shards that are checked side by side; one per processor if not given.

    Raises:
        DataError: the manifest is missing or damaged.
        StoreError: the storage failed.
    """
    manifest = read_manifest(store)
    checks = [_ShardCheck(store, manifest, number) for number in range(len(manifest.shards))]
    problems: list[str] = []
    carried: int | None = None
    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0)), thread_name_prefix="verify") as pool:
        for check, found in zip(checks, pool.map(lambda check: list(check.run()), checks), strict=True):
            if not found and carried is not None and check.first_token not in (None, carried):
                found = [f"{check.where}: {_begins_wrong(check.first_token, carried)}"]
            problems += found
            carried = check.next_token if not found else None
    if carried is not None and carried != manifest.eos_id:
        problems.append(f"{store.url}: the last block is followed by token {carried}, not by eos {manifest.eos_id}")
    for name in ("documents", "tokens", "source_tokens", "text_bytes"):
        if getattr(manifest, name) != sum(getattr(shard, name) for shard in manifest.shards):
            problems.append(f"{store.url}: {name} of the manifest is not the sum over its shards")
    return VerifyReport(
        url=store.url,
        sha256=manifest.sha256,
        shards=len(manifest.shards),
        blocks=manifest.blocks,
        documents=manifest.documents,
        tokens=manifest.tokens + manifest.source_tokens,
        problems=tuple(problems),
    )


class _ShardCheck:
    """One shard. `first_token` begins it, `next_token` must begin the following one (cut text only)."""

    def __init__(self, store: Store, manifest: Manifest, number: int) -> None:
        self._store, self._manifest, self._number = store, manifest, number
        self._entry = manifest.shards[number]
        self.where = f"{store.url}/{self._entry.name}"
        self.first_token: int | None = None
        self.next_token: int | None = None

    def run(self) -> Iterator[str]:
        """Yields problems."""
        try:
            data = self._store.get(self._entry.name)
        except NotFoundError:
            yield f"{self.where} is missing"
            return
        if len(data) != self._entry.bytes:
            yield f"{self.where} holds {len(data)} bytes, the manifest says {self._entry.bytes}"
        elif hashlib.sha256(data).hexdigest() != self._entry.sha256:
            yield f"{self.where} does not match its sha256"
        try:
            where = self.where + INDEX_SUFFIX
            index = ShardIndex.from_bytes(
                self._store.get(self._entry.name + INDEX_SUFFIX), self._manifest, self._number, where
            )
        except NotFoundError:
            yield f"{where} is missing"
            return
        except DataError as error:
            yield str(error)
            return
        sums = np.zeros(3, dtype=np.int64)
        for row in range(len(index)):
            members, damage = self._members(memoryview(data), index, row)
            problems = damage or list(self._content(members, index, row, sums))
            yield from (f"{self.where}, block {index.block_number(row)}: {problem}" for problem in problems)
            if problems:
                self.next_token = None
        expected = (self._entry.documents, self._entry.tokens, self._entry.source_tokens)
        if self.next_token is not None and tuple(sums.tolist()) != expected:
            yield f"{self.where} holds {sums.tolist()} documents, tokens, source tokens, the manifest says {expected}"

    def _members(self, data: memoryview, index: ShardIndex, row: int) -> tuple[list[memoryview], list[str]]:
        members, problems = [], []
        for member, suffix in enumerate(index.members):
            span = index.span(row, member)
            payload = data[span.offset : span.offset + span.length]
            header = data[span.offset - _TAR_BLOCK : span.offset]
            if len(payload) != span.length:
                problems.append(f"{suffix} is cut off at {len(data)} bytes")
            elif crc32(payload) != span.crc32:
                problems.append(f"{suffix} does not match its crc32")
            elif header != ustar_header(f"{index.block_number(row):08d}.{suffix}", span.length):
                problems.append(f"the tar header of {suffix} is damaged")
            members.append(payload)
        return members, problems

    def _content(self, members: list[memoryview], index: ShardIndex, row: int, sums: np.ndarray) -> Iterator[str]:
        manifest = self._manifest
        mask = -2 if manifest.masked else -1  # where the ids and ends stop
        sides = [
            (np.frombuffer(ids, dtype=f"<{manifest.dtype}"), np.frombuffer(ends, dtype="<u4").astype(np.int64))
            for ids, ends in zip(members[0:mask:2], members[1:mask:2], strict=True)
        ]
        documents, continued = decode_provenance(bytes(members[-1]))
        for ids, _ in sides:
            if int(ids.max()) >= manifest.vocabulary_size:
                yield f"token id {int(ids.max())} is outside the vocabulary of {manifest.vocabulary_size}"
        if manifest.masked:
            marks = np.frombuffer(members[-2], dtype=np.uint8)
            if marks.size != sides[0][0].size or int(marks.max()) > 1:
                yield f"a mask of {marks.size} values up to {int(marks.max())} for {sides[0][0].size} ids"
        last = index.block_number(row) == manifest.blocks - 1
        if manifest.kind == "tokens":
            ids, ends = sides[0]
            if manifest.row_tokens:
                pieces = _unfinished(bytes(members[-1]))
                yield from self._rows(ids, ends, index.real_tokens(row), len(documents), pieces)
            else:
                pieces = 0
                yield from self._text(ids, ends, index.real_tokens(row), len(documents), last=last)
            sums += (len(ends) - pieces, index.real_tokens(row), 0)
            self.next_token = int(ids[-1])
        else:
            source, target = (
                _row_lengths(ends, capacity)
                for (_, ends), capacity in zip(sides, (manifest.source_capacity, manifest.target_capacity), strict=True)
            )
            if source is None or target is None:
                yield "document ends are not ascending, or a row has no free slot"
                return
            if not np.array_equal(source[1], target[1]) or len(documents) != len(sides[0][1]) or continued:
                yield "rows hold other numbers of documents on one side than on the other or in the provenance"
            if target[0] != index.real_tokens(row):
                yield f"the index says {index.real_tokens(row)} target tokens, the rows hold {target[0]}"
            sums += (len(documents), target[0], source[0])
            self.next_token = manifest.eos_id

    def _rows(
        self, ids: np.ndarray, ends: np.ndarray, real_tokens: int, num_documents: int, pieces: int
    ) -> Iterator[str]:
        """Rows of whole documents; `pieces` of them are parts of documents that no row could hold."""
        manifest = self._manifest
        if len(ids) != manifest.block_tokens + 1:
            yield f"{len(ids)} ids, a block has {manifest.block_tokens + 1}"
            return
        found = _row_lengths(ends, manifest.row_tokens, free_slots=0)
        if found is None or (len(ends) and int(ends[-1]) > manifest.block_tokens):
            yield "document ends are not ascending"
            return
        if (ids[ends - 1] != manifest.eos_id).sum() > pieces:
            yield "a document does not end with eos"
        if found[0] != real_tokens:
            yield f"the index says {real_tokens} tokens, the rows hold {found[0]}"
        if num_documents != len(ends):
            yield f"{num_documents} documents in the provenance, {len(ends)} in the block"

    def _text(
        self, ids: np.ndarray, ends: np.ndarray, real_tokens: int, num_documents: int, *, last: bool
    ) -> Iterator[str]:
        manifest = self._manifest
        if len(ids) != manifest.block_tokens + 1:
            yield f"{len(ids)} ids, a block has {manifest.block_tokens + 1}"
        if self.first_token is None:
            self.first_token = int(ids[0])
        elif self.next_token is not None and int(ids[0]) != self.next_token:
            yield _begins_wrong(int(ids[0]), self.next_token)
        if (np.diff(ends, prepend=0) < 1).any() or (len(ends) and int(ends[-1]) > real_tokens):
            yield "document ends are not ascending within the real tokens"
        elif (ids[ends - 1] != manifest.eos_id).any():
            yield "a document does not end with eos"
        goes_on = not len(ends) or int(ends[-1]) != manifest.block_tokens
        if last:
            goes_on = False
            if not len(ends) or int(ends[-1]) != real_tokens:
                yield "the last document does not end with the real tokens"
        elif real_tokens != manifest.block_tokens:
            yield "padding before the last block"
        if num_documents != len(ends) + goes_on:
            yield f"{num_documents} documents in the provenance, {len(ends) + goes_on} in the block"


def _begins_wrong(token: int | None, promised: int) -> str:
    return f"begins with token {token}, the block before says {promised}"


def _unfinished(provenance: bytes) -> int:
    """Pieces of documents that go on in another row."""
    return sum(isinstance(number, list) for number in json.loads(provenance).get("numbers", ()))


def _row_lengths(ends: np.ndarray, capacity: int, free_slots: int = 1) -> tuple[int, np.ndarray] | None:
    """(tokens of all rows, row of each document); None if the ends break the layout."""
    rows = (ends - 1) // capacity
    starts = np.concatenate([[0], ends[:-1]])
    new_row = np.concatenate([[True], rows[1:] != rows[:-1]]) if len(rows) else np.zeros(0, dtype=bool)
    lengths = ends - np.where(new_row, rows * capacity, starts)
    if (lengths < 1).any() or (ends > (rows + 1) * capacity - free_slots).any():
        return None
    return int(lengths.sum()), rows
