"""Stage of a build: one shard of the finished source, from parts.

Takes the shard's number, its first block and the parts that it needs -> writes the tar and its index, gives the
manifest's entry. A pure function of the parts and the layout; see `tasks`.
Invariants: what comes out does not depend on where parts begin or end; memory is one part and, for
whole documents in rows, the shard's tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from pretrain.data.format import INDEX_SUFFIX, Manifest, join_provenance
from pretrain.data.packing import BlockCutter, CutBlock, lay_out
from pretrain.data.part import Part, part_infos
from pretrain.data.shard_writer import BlockCounts, ShardBytes
from pretrain.data.stage_pack import RowTable
from pretrain.data.tick import Tick
from pretrain.data.trained_parts import TRAINED_BIT, split_marks
from pretrain.store import Store

_PIECE_BYTES = 2**20


def write_shard(store: Store, out: Store, common: dict[str, Any], item: dict[str, Any], tick: Tick) -> dict[str, Any]:
    """Writes one shard.

    Args:
        out: of the finished sources.
        common: headers, by split: the manifest without counts.
        item: split, shard, first_block, blocks, parts; and for plain text skip_tokens (of the first part) and last;
            for rows of whole documents tables: [key, first row, row behind the last] each.
        tick: hears the tokens that were written.
    """
    split = item["split"]
    header = Manifest(**common["headers"][split]["manifest"])
    target = out.child(common["headers"][split]["folder"])
    shard = ShardBytes(item["shard"], header)
    make = _packed_blocks if header.packed else _cut_blocks

    def blocks() -> Iterator[bytes | memoryview]:
        for place, (arrays, provenance, counts) in enumerate(make(store, header, item)):
            yield from shard.add(item["first_block"] + place, arrays, provenance, counts)
            tick(counts.text_bytes, counts.tokens + counts.source_tokens)
        yield shard.end()

    target.put_stream(shard.name, _joined(blocks()))
    target.put(shard.name + INDEX_SUFFIX, shard.index())
    return shard.entry()._asdict()


def _joined(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Larger pieces: a write per tar header would cost more than the header."""
    waiting: list[bytes | memoryview] = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= _PIECE_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
    yield b"".join(waiting)


Content = tuple[list[np.ndarray], bytes, BlockCounts]


def _cut_blocks(store: Store, header: Manifest, item: dict[str, Any]) -> Iterator[Content]:
    """Blocks cut from the concatenated documents."""
    skip = item["skip_tokens"]
    origins: list[str] = []
    rests: list[bytes] = []
    sizes: list[int] = []
    begun = 0  # documents before this one have ended in a block
    cutter: BlockCutter | None = None
    left = item["blocks"]

    def content(block: CutBlock) -> Content:
        nonlocal begun
        here, ended = slice(begun, begun + block.num_documents), slice(begun, begun + len(block.ends))
        provenance = join_provenance(origins[here], rests[here], continued=block.continued, text_bytes=sizes[here])
        begun = ended.stop
        counts = BlockCounts(len(block.ends), block.real_tokens, 0, sum(sizes[ended]))
        return _members(header, block.ids, block.ends), provenance, counts

    for info in part_infos(item["parts"]):
        part = Part.load(store, info.key)
        first, ids, lengths = 0, part.marked_ids(), part.lengths
        if cutter is None:
            ends = np.cumsum(lengths)
            first = int(np.searchsorted(ends, skip, side="right"))
            lengths = lengths[first:].copy()
            lengths[0] = ends[first] - skip
            cutter = BlockCutter(
                header.block_tokens,
                eos_id=header.eos_id,
                pad_id=header.pad_id,
                continued=bool(lengths[0] != part.lengths[first]),
            )
            ids = ids[skip:]
        del origins[:begun], rests[:begun], sizes[:begun]
        begun = 0
        origins += part.origin_names()[first:]
        rests += part.rests()[first:]
        sizes += part.text_bytes[first:].tolist()
        for block in cutter.add(ids, lengths):
            yield content(block)
            left -= 1
            if not left:
                return
    if cutter is not None and item["last"]:
        for block in cutter.finish():
            yield content(block)


def _members(header: Manifest, ids: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
    """The arrays of a block of plain text."""
    if not header.masked:
        return [ids, ends]
    plain, trained = split_marks(ids)
    return [plain, ends, trained]


def _packed_blocks(store: Store, header: Manifest, item: dict[str, Any]) -> Iterator[Content]:
    """Blocks of rows of whole documents."""
    table = _rows_of(store, item["tables"])
    pairs = header.kind == "pairs"
    capacities = [header.target_capacity, header.source_capacity] if pairs else [header.row_tokens]
    rows_per_block = header.rows_per_block if pairs else header.block_tokens // header.row_tokens
    num_rows = item["blocks"] * rows_per_block
    places = [lay_out(table.row, table.lengths[:, side], capacity) for side, capacity in enumerate(capacities)]
    dtype = "<u4" if header.masked else f"<{header.dtype}"
    slots = [np.full(num_rows * capacity, header.pad_id, dtype=dtype) for capacity in capacities]
    gathered = _Gathered(len(table.number))
    by_number = np.argsort(table.number, kind="stable")
    ordered = table.number[by_number]
    for info in part_infos(item["parts"]):
        part = Part.load(store, info.key)
        numbers = part.numbers if len(part.numbers) else np.arange(info.first, info.stop)
        low, high = np.searchsorted(ordered, [info.first, info.stop])
        entries = by_number[low:high]
        documents = np.searchsorted(numbers, table.number[entries])
        for side, slot in enumerate(slots):
            ids, lengths = ((part.marked_ids(), part.lengths), (part.source_ids, part.source_lengths))[side]
            begin = np.cumsum(lengths) - lengths
            _copy(
                slot,
                places[side][0][entries],
                ids,
                begin[documents] + table.start[entries],
                table.lengths[entries, side],
            )
        gathered.take(part, entries, documents)
    for slot, (_, stop) in zip(slots, places, strict=True):
        last = stop[table.final] - 1
        marks = slot[last] & np.uint32(TRAINED_BIT) if header.masked else 0
        slot[last] = header.eos_id | marks  # of documents that were cut to fit; the others end so already
    for block in range(item["blocks"]):
        low, high = np.searchsorted(table.row, [block * rows_per_block, (block + 1) * rows_per_block]).tolist()
        yield _packed_block(header, table, gathered, slots, places, capacities, block * rows_per_block, (low, high))


def _packed_block(
    header: Manifest,
    table: RowTable,
    gathered: _Gathered,
    slots: list[np.ndarray],
    places: list[tuple[np.ndarray, np.ndarray]],
    capacities: list[int],
    first_row: int,
    entries: tuple[int, int],
) -> Content:
    chosen = slice(*entries)
    rows = header.rows_per_block if header.kind == "pairs" else header.block_tokens // header.row_tokens
    arrays: list[np.ndarray] = []
    for slot, (_, stop), capacity in reversed(list(zip(slots, places, capacities, strict=True))):
        begin = first_row * capacity
        arrays += [slot[begin : begin + rows * capacity], stop[chosen] - begin]
    if header.kind == "tokens":
        arrays = _members(header, np.append(arrays[0], arrays[0].dtype.type(header.eos_id)), arrays[1])
    final = table.final[chosen]
    lengths = table.lengths[chosen].sum(axis=0).tolist()
    sizes = gathered.text_bytes[chosen]
    pieces = (table.start[chosen] // max(header.row_tokens, 1)).tolist()
    numbers: list[int | list[int]] = [
        number if ends else [number, piece]
        for number, piece, ends in zip(table.number[chosen].tolist(), pieces, final.tolist(), strict=True)
    ]
    provenance = join_provenance(
        gathered.origins[chosen], gathered.rests[chosen], text_bytes=sizes.tolist(), numbers=numbers
    )
    counts = BlockCounts(
        documents=int(final.sum()),
        tokens=lengths[0],
        source_tokens=lengths[1] if len(lengths) > 1 else 0,
        text_bytes=int(sizes[final].sum()),
    )
    return arrays, provenance, counts


class _Gathered:
    """What blocks say of their documents, by entry."""

    def __init__(self, entries: int) -> None:
        self.origins: list[str] = [""] * entries
        self.rests: list[bytes] = [b""] * entries
        self.text_bytes = np.zeros(entries, dtype=np.int64)

    def take(self, part: Part, entries: np.ndarray, documents: np.ndarray) -> None:
        origins, rests = part.origin_names(), part.rests()
        self.text_bytes[entries] = part.text_bytes[documents]
        for entry, document in zip(entries.tolist(), documents.tolist(), strict=True):
            self.origins[entry], self.rests[entry] = origins[document], rests[document]


def _rows_of(store: Store, tables: list[list[Any]]) -> RowTable:
    """The rows of a shard from the tables of its windows, numbered from 0."""
    found: list[RowTable] = []
    before = 0
    for key, first, stop in tables:
        rows = RowTable.load(store, key).rows(first, stop)
        found.append(RowTable(rows.number, rows.start, rows.lengths, rows.final, rows.row + before))
        before += stop - first
    return RowTable(
        number=np.concatenate([table.number for table in found]),
        start=np.concatenate([table.start for table in found]),
        lengths=np.concatenate([table.lengths for table in found]),
        final=np.concatenate([table.final for table in found]),
        row=np.concatenate([table.row for table in found]),
    )


def _copy(to: np.ndarray, to_start: np.ndarray, ids: np.ndarray, ids_start: np.ndarray, lengths: np.ndarray) -> None:
    """Copies runs of ids."""
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    to[np.repeat(to_start, lengths) + within] = ids[np.repeat(ids_start, lengths) + within]
