"""Reads blocks of a built source, every byte checked before anybody sees it.

Takes (store, manifest) -> gives `TokenBlock` or `PairBlock` by number.

A block is read as one range and copied, not mapped: what was checked is what is delivered even if the
file changes later, and a truncated file or a failing disk is an error that names it instead of a
SIGBUS that kills the rank. Sizes of all shards are checked at
open, indexes by sha256 (at open, or at first use where there are very many). A block with a wrong
crc32 is fetched once more past the cache, then it is corrupt for good. Failures of the storage itself
are retried with jitter and never taken for corruption (`fetch`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pretrain.data.cache import BlockCache
from pretrain.data.checksum import crc32
from pretrain.data.fetch import FetchCounts, Fetcher, Request
from pretrain.data.format import (
    INDEX_SUFFIX,
    MANIFEST_NAME,
    Manifest,
    MemberSpan,
    Provenance,
    ShardIndex,
    decode_provenance,
)
from pretrain.data.objective import I64, Ids
from pretrain.data.source_files import check_sizes
from pretrain.errors import DataError
from pretrain.log import Log
from pretrain.store import NotFoundError, Store

_EAGER_SHARDS = 64  # above, indexes are read when they are used: a start takes no longer where there are many
_KEPT_INDEXES = 4096
_AHEAD = 32  # blocks on their way at once; a step reads lanes x window_blocks of a source or fewer


class TokenBlock(NamedTuple):
    """`ids` [block_tokens + 1], ascending document `ends`, tokens before padding, which ids are targets (None: all)."""

    ids: Ids
    ends: I64
    real_tokens: int
    trained: NDArray[np.uint8] | None = None


class PairBlock(NamedTuple):
    """Slots [rows x capacity] and ascending ends of both sides."""

    source_ids: Ids
    source_ends: I64
    target_ids: Ids
    target_ends: I64


class _Place(NamedTuple):
    """Where a block is: `length` bytes of `key` from `start` on hold its data members."""

    block: int
    shard: int
    key: str
    spans: list[MemberSpan]
    start: int
    length: int
    real_tokens: int


def is_remote(store: Store) -> bool:
    """Whether reading it goes over a network as far as this process knows."""
    return store.local_path(MANIFEST_NAME) is None


class CorruptBlockError(DataError):
    """A block that is still wrong after it was fetched again."""

    def __init__(self, message: str, source: str, block: int) -> None:
        super().__init__(message, source, block)
        self.source, self.block = source, block

    def __str__(self) -> str:
        return str(self.args[0])


class BlockReader:
    """Blocks of one source. For one thread at a time.

    Args:
        store: where manifest, shards and indexes lie.
        manifest: of this source.
        name: in messages; the manifest's by default.
        kept_blocks: blocks that stay in memory, least recently used out first.
        cache: for remote stores.

    Raises:
        DataError: shards missing or of a wrong size (all are named), an index damaged.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        *,
        name: str | None = None,
        kept_blocks: int = 32,
        cache: BlockCache | None = None,
    ) -> None:
        self.store, self.manifest, self.name = store, manifest, name or manifest.name
        self.fetching = ""  # what is being read right now, for whoever waits too long
        self.is_remote = is_remote(store)
        self._cache = cache if self.is_remote else None
        self._kept_blocks = kept_blocks
        self._log = Log()
        self._fetcher = Fetcher(store, is_remote=self.is_remote, log=self._log)
        self._ahead: dict[int, Request] = {}
        self._blocks: OrderedDict[int, TokenBlock | PairBlock] = OrderedDict()
        self._corrupt: dict[int, str] = {}
        self._indexes: OrderedDict[int, ShardIndex] = OrderedDict()
        self._block_ends = list(accumulate(shard.blocks for shard in manifest.shards))
        is_lazy = len(manifest.shards) > _EAGER_SHARDS
        check_sizes(manifest, self.name, self._fetcher, with_indexes=is_lazy)
        if not is_lazy:
            for number in range(len(manifest.shards)):
                self._index(number)

    @property
    def counts(self) -> FetchCounts:
        """What reading took so far: requests, retries, hedges, cache hits, waits."""
        return self._fetcher.counts

    def request(self, blocks: Iterable[int]) -> None:
        """Says which blocks are read next: those of a remote source are sent for at once, side by side. What was on
        its way and is not among them is given up. Changes nothing but time."""
        if not self.is_remote:
            return
        wanted = [block for block in blocks if block not in self._blocks and block not in self._corrupt]
        self._ahead = {block: self._ahead[block] for block in wanted if block in self._ahead}
        for block in wanted:
            if len(self._ahead) >= _AHEAD:
                return
            if block not in self._ahead:
                place = self._place(block)
                if self._cache is None or not self._cache.has(self._cache_key(place)):
                    self._ahead[block] = self._fetcher.start(place.key, place.start, place.length)

    def read(self, block: int, out: Ids | None = None) -> TokenBlock | PairBlock:
        """One block, 0 <= block < manifest.blocks. The latest ones stay in memory.

        Args:
            out: [block_tokens + 1] of a source of tokens: its ids are read into this array, which is whole and checked
                once the block is given, and then it is the caller who keeps it.

        Raises:
            CorruptBlockError: its bytes are wrong, also after fetching them again.
            StoreError: the storage failed, also after retries.
            DataError: the shard's index is damaged.
        """
        known = None if out is not None else self._blocks.get(block)
        if known is not None:
            self._blocks.move_to_end(block)
            return known
        if block in self._corrupt:  # settled: the answer must not change while the process lives
            raise CorruptBlockError(self._corrupt[block], self.name, block)
        place = self._place(block)
        payloads = self._fetch(place, out, fresh=False)
        problem = self._wrong_checksum(place.spans, payloads)
        if problem:
            self._log.warning(f"block {block} of source {self.name} came damaged ({problem}), reading it again")
            self.counts.refetched += 1
            payloads = self._fetch(place, out, fresh=True)
            problem = self._wrong_checksum(place.spans, payloads)
        if problem:
            self._corrupt[block] = self._describe(block, f"is damaged: {problem}, also when read again")
            raise CorruptBlockError(self._corrupt[block], self.name, block)
        parsed = self._parse(place, payloads)
        if out is not None:
            return parsed
        self._blocks[block] = parsed
        if len(self._blocks) > self._kept_blocks:
            self._blocks.popitem(last=False)
        return parsed

    def provenance(self, block: int) -> tuple[list[Provenance], bool]:
        """Where the documents of a block come from; whether the first began in an earlier block.

        Raises:
            CorruptBlockError, StoreError, DataError: as for `read`.
        """
        return decode_provenance(self.provenance_json(block))

    def provenance_json(self, block: int) -> bytes:
        """All that a block says of its documents, as it is stored. Raises as `provenance`."""
        shard, row = self.locate(block)
        span = self._index(shard).span(row, len(self.manifest.members) - 1)
        data = self._get_range(self.manifest.shards[shard].name, span.offset, span.length)
        if len(data) != span.length or crc32(data) != span.crc32:
            message = self._describe(block, "has damaged provenance: its crc32 is not the index's")
            raise CorruptBlockError(message, self.name, block)
        return data

    def locate(self, block: int) -> tuple[int, int]:
        """Number of the shard that holds a block, and the block's place in it."""
        if not 0 <= block < self.manifest.blocks:
            raise IndexError(f"block {block} of source {self.name}, which has {self.manifest.blocks}")
        shard = bisect_right(self._block_ends, block)
        return shard, block - (self._block_ends[shard - 1] if shard else 0)

    # --------------------------------------------------------------------------------------- indexes

    def _index(self, shard: int) -> ShardIndex:
        if shard in self._indexes:
            self._indexes.move_to_end(shard)
            return self._indexes[shard]
        key = self.manifest.shards[shard].name + INDEX_SUFFIX
        where = f"{self.store.url}/{key}"
        try:
            data = self._fetcher.patiently(lambda: self.store.get(key))
            try:
                index = ShardIndex.from_bytes(data, self.manifest, shard, where)
            except DataError as problem:
                self._log.warning(f"{problem.args[0].partition('. ')[0]}; reading it again")
                self.counts.refetched += 1
                again = self._fetcher.patiently(lambda: self.store.get(key))
                index = ShardIndex.from_bytes(again, self.manifest, shard, where)
        except NotFoundError:
            raise DataError(
                f"source {self.name} is not whole: {where} is missing. Every shard has its index beside it. "
                "Copy the source again or rebuild it with `pretrain data build`."
            ) from None
        self._indexes[shard] = index
        if len(self._indexes) > _KEPT_INDEXES:
            self._indexes.popitem(last=False)
        return self._indexes[shard]

    # --------------------------------------------------------------------------------------- fetching

    def _place(self, block: int) -> _Place:
        shard, row = self.locate(block)
        index = self._index(shard)
        spans = index.data_spans(row)
        start, last = spans[0].offset, spans[-1]
        key, length = self.manifest.shards[shard].name, last.offset + last.length - start
        return _Place(block, shard, key, spans, start, length, index.real_tokens(row))

    def _fetch(self, place: _Place, out: Ids | None, *, fresh: bool) -> list[memoryview]:
        """The block's data members in one read: from the cache, or (always if `fresh`) from the store. The first one is
        in `out` if it has the size of that."""
        start, size = place.start, place.spans[0].length
        into = None if out is None or out.nbytes != size else out.view(np.uint8).data
        if into is not None and self._fetcher.fills_buffers:
            rest, behind = memoryview(bytearray(place.length - size)), start + size
            self.fetching = self._named(place.key, start, place.length)
            try:
                self._fetcher.get_range_into(place.key, start, [into, rest])
            finally:
                self.fetching = ""
            return [
                into,
                *(rest[span.offset - behind : span.offset - behind + span.length] for span in place.spans[1:]),
            ]
        view = memoryview(self._whole(place, fresh=fresh))
        payloads = [view[span.offset - start : span.offset - start + span.length] for span in place.spans]
        if into is not None and payloads[0].nbytes == size:
            into[:] = payloads[0]
            payloads[0] = into
        return payloads

    def _whole(self, place: _Place, *, fresh: bool) -> bytes:
        """The bytes of a block, from wherever they are."""
        ahead = self._ahead.pop(place.block, None)
        if self._cache is None:
            return self._get_range(place.key, place.start, place.length, ahead)
        key = self._cache_key(place)
        data = None if fresh or ahead is not None else self._cache.get(key)
        if data is not None:
            self.counts.cache_hits += 1
            return data
        data = self._get_range(place.key, place.start, place.length, ahead)
        self._cache.put(key, data)
        return data

    def _cache_key(self, place: _Place) -> str:
        return f"{self.manifest.shards[place.shard].sha256}-{place.start}-{place.length}"

    def _named(self, key: str, start: int, length: int) -> str:
        return f"{self.store.url}/{key} (source {self.name}, bytes {start} to {start + length})"

    def _get_range(self, key: str, start: int, length: int, ahead: Request | None = None) -> bytes:
        self.fetching = self._named(key, start, length)
        try:
            if ahead is not None:
                return self._fetcher.result(ahead)
            return self._fetcher.get_range(key, start, length)
        finally:
            self.fetching = ""

    def _wrong_checksum(self, spans: list[MemberSpan], payloads: list[memoryview]) -> str:
        for member, span, payload in zip(self.manifest.members, spans, payloads, strict=False):
            if len(payload) != span.length:
                return f"{len(payload)} of {span.length} bytes of {member} came"
            if crc32(payload) != span.crc32:
                return f"the crc32 of {member} is not the index's"
        return ""

    # ---------------------------------------------------------------------------------------- parsing

    def _parse(self, place: _Place, payloads: list[memoryview]) -> TokenBlock | PairBlock:
        manifest, block = self.manifest, place.block
        if manifest.kind == "tokens":
            ids, ends = self._side(block, payloads[0], payloads[1], manifest.block_tokens + 1, manifest.block_tokens)
            real_tokens = place.real_tokens
            last_end = int(ends[-1]) if ends.size else 0
            trained = np.frombuffer(payloads[2], dtype=np.uint8) if manifest.masked else None
            if trained is not None and (trained.size != ids.size or int(trained.max()) > 1):
                raise self._unfit(block, f"a mask of {trained.size} values up to {int(trained.max())}")
            if manifest.row_tokens:  # every row has its own padding
                return TokenBlock(ids, ends, real_tokens, trained)
            is_padded = real_tokens < manifest.block_tokens  # only behind the end of a document
            if real_tokens > manifest.block_tokens or last_end > real_tokens or (is_padded and last_end != real_tokens):
                raise self._unfit(block, f"real_tokens={real_tokens} with a last document end at {last_end}")
            return TokenBlock(ids, ends, real_tokens, trained)
        source_slots = manifest.rows_per_block * manifest.source_capacity
        target_slots = manifest.rows_per_block * manifest.target_capacity
        source_ids, source_ends = self._side(block, payloads[0], payloads[1], source_slots, source_slots)
        target_ids, target_ends = self._side(block, payloads[2], payloads[3], target_slots, target_slots)
        return PairBlock(source_ids, source_ends, target_ids, target_ends)

    def _side(self, block: int, ids: memoryview, ends: memoryview, num_ids: int, last_end: int) -> tuple[Ids, I64]:
        """Ids and ends as arrays; what passes the checksum but breaks the format was written wrongly."""
        width = 2 if self.manifest.dtype == "u2" else 4
        if len(ids) != num_ids * width or len(ends) % 4:
            raise self._unfit(block, f"{len(ids)} bytes of ids and {len(ends)} of ends")
        array = np.frombuffer(ids, dtype=f"<u{width}")
        if int(array.max()) >= self.manifest.vocabulary_size:
            raise self._unfit(block, f"id {int(array.max())} outside the vocabulary of {self.manifest.vocabulary_size}")
        edges = np.frombuffer(ends, dtype="<u4").astype(np.int64)
        if edges.size and (edges[0] < 1 or edges[-1] > last_end or bool((edges[1:] <= edges[:-1]).any())):
            raise self._unfit(block, f"document ends that do not ascend within 1..{last_end}")
        return array, edges

    def _unfit(self, block: int, found: str) -> DataError:
        return DataError(self._describe(block, f"breaks the format ({found})"))

    def _describe(self, block: int, what: str) -> str:
        shard, _ = self.locate(block)
        return (
            f"block {block} of source {self.name} (shard {self.store.url}/{self.manifest.shards[shard].name}) {what}. "
            "Copy the shard again or rebuild the source; `pretrain data verify` names every damaged one; "
            "data.on_corrupt=mask trains on without it."
        )
