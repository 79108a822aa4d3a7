"""Stage of a repack: a built source -> parts in corpus order, without tokenising.

Takes a source's store -> writes parts as the encode stage would have. Rows of whole documents are put back in the
order of the corpus window by window, pieces of a document that no row could hold are joined again.
Invariants: memory is a window of documents and a part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from pretrain.data.blocks import BlockReader, PairBlock, TokenBlock
from pretrain.data.format import Manifest, canonical_json, read_manifest
from pretrain.data.packing import WINDOW_DOCUMENTS
from pretrain.data.part import PartBuilder
from pretrain.data.tick import Tick
from pretrain.data.trained_parts import with_marks
from pretrain.errors import DataError
from pretrain.store import Store, open_store

_PART_TOKENS = 2**21


class _Entry(NamedTuple):
    """One document of a row, or a piece of one; the first two fields put it in its place."""

    number: int
    piece: int
    ids: np.ndarray
    source_ids: np.ndarray
    origin: str
    rest: bytes
    text_bytes: int


class _Described(NamedTuple):
    """What a block's JSON says of its documents."""

    origins: list[str]
    rests: list[bytes]
    text_bytes: list[int]
    numbers: list[int | list[int]]


def unpack_source(store: Store, folder: str, item: dict[str, Any], tick: Tick) -> dict[str, Any]:
    """Writes the parts of one source.

    Args:
        item: url of the source.

    Raises:
        DataError: the source is damaged, or says too little of its documents.
        StoreError: the storage failed.
    """
    opened = open_store(item["url"])
    manifest = read_manifest(opened)
    reader = BlockReader(opened, manifest, kept_blocks=1)
    parts: list[list[Any]] = []
    builder = PartBuilder("<" + manifest.dtype, masked=manifest.masked)
    fill = _window_documents if manifest.packed else _cut_documents
    for first, stop in fill(reader, manifest, builder, tick):
        if builder.tokens >= _PART_TOKENS or stop == -1:
            if len(builder):
                part = builder.build()
                key = f"{folder}/{len(parts):06d}.part"
                part.save(store, key)
                begin = int(part.numbers[0]) if len(part.numbers) else first
                end = int(part.numbers[-1]) + 1 if len(part.numbers) else first + len(part.lengths)
                parts.append([key, len(part.lengths), len(part.ids), len(part.source_ids), begin, end])
            builder.clear()
    return {"parts": parts}


def _described(reader: BlockReader, block: int, where: str) -> _Described:
    body = json.loads(reader.provenance_json(block))
    if "text_bytes" not in body:
        raise DataError(
            f"{where}, block {block} does not say how long its documents' text was. Repacking needs a source that "
            "`pretrain data build` wrote. Build it again."
        )
    return _Described(
        origins=[body["origins"][row[0]] for row in body["documents"]],
        rests=[canonical_json(row[1:])[1:-1] for row in body["documents"]],
        text_bytes=body["text_bytes"],
        numbers=body.get("numbers", []),
    )


def _cut_documents(
    reader: BlockReader, manifest: Manifest, builder: PartBuilder, tick: Tick
) -> Iterator[tuple[int, int]]:
    """Joins what blocks have cut; yields (number of the part's first document, 0) after each block, -1 at the end."""
    begun = np.zeros(0, dtype="<u4" if manifest.masked else f"<{manifest.dtype}")  # of a document that goes on
    first = documents = 0
    for number in range(manifest.blocks):
        block = reader.read(number)
        assert isinstance(block, TokenBlock)
        described = _described(reader, number, reader.store.url)
        ended = len(block.ends)
        last = int(block.ends[-1]) if ended else 0
        if ended:
            lengths = np.diff(block.ends, prepend=0)
            lengths[0] += len(begun)
            ids = np.concatenate([begun, _marked(block)[:last]])
            builder.add(ids, lengths, described.origins[:ended], described.rests[:ended], described.text_bytes[:ended])
            begun = begun[:0]
            documents += ended
        begun = np.concatenate([begun, _marked(block)[last : block.real_tokens]])
        tick(sum(described.text_bytes[:ended]), block.real_tokens)
        yield first, -1 if number == manifest.blocks - 1 else 0
        if not len(builder):
            first = documents


def _window_documents(
    reader: BlockReader, manifest: Manifest, builder: PartBuilder, tick: Tick
) -> Iterator[tuple[int, int]]:
    """Puts the documents of each window in order; yields (0, 0) after each window, (0, -1) at the end."""
    waiting: list[_Entry] = []
    window = 0
    for number in range(manifest.blocks):
        for entry in _entries(reader, manifest, number):
            if entry.number // WINDOW_DOCUMENTS != window:
                _add_in_order(builder, waiting, pairs=manifest.kind == "pairs")
                yield 0, 0
                waiting, window = [], entry.number // WINDOW_DOCUMENTS
            waiting.append(entry)
            tick(entry.text_bytes, len(entry.ids) + len(entry.source_ids))
    _add_in_order(builder, waiting, pairs=manifest.kind == "pairs")
    yield 0, -1


def _entries(reader: BlockReader, manifest: Manifest, number: int) -> Iterator[_Entry]:
    block = reader.read(number)
    described = _described(reader, number, reader.store.url)
    if isinstance(block, PairBlock):
        targets = _documents(block.target_ids, block.target_ends, manifest.target_capacity)
        sources = _documents(block.source_ids, block.source_ends, manifest.source_capacity)
    else:
        targets = _documents(_marked(block), block.ends, manifest.row_tokens)
        sources = [block.ids[:0]] * len(targets)
    for place, (ids, source_ids) in enumerate(zip(targets, sources, strict=True)):
        which = described.numbers[place]
        document, piece = which if isinstance(which, list) else (which, 2**32)  # the last piece comes after all others
        yield _Entry(
            document,
            piece,
            ids,
            source_ids,
            described.origins[place],
            described.rests[place],
            described.text_bytes[place],
        )


def _marked(block: TokenBlock) -> np.ndarray:
    """The ids, with marks where the block says what is trained."""
    return block.ids if block.trained is None else with_marks(block.ids, block.trained)


def _documents(ids: np.ndarray, ends: np.ndarray, capacity: int) -> list[np.ndarray]:
    starts = np.maximum(np.append(0, ends)[: len(ends)], (ends - 1) // capacity * capacity)
    return [ids[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def _add_in_order(builder: PartBuilder, entries: list[_Entry], *, pairs: bool) -> None:
    if not entries:
        return
    entries.sort(key=lambda entry: (entry.number, entry.piece))
    numbers = np.array([entry.number for entry in entries])
    is_last = np.append(numbers[1:] != numbers[:-1], True)
    group = np.cumsum(np.append(0, is_last[:-1]))
    lengths = np.bincount(group, weights=[len(entry.ids) for entry in entries]).astype(np.int64)
    whole = [entry for entry, last in zip(entries, is_last.tolist(), strict=True) if last]
    source = None
    if pairs:
        source_lengths = np.array([len(entry.source_ids) for entry in whole], dtype=np.int64)
        source = (np.concatenate([entry.source_ids for entry in whole]), source_lengths)
    builder.add(
        np.concatenate([entry.ids for entry in entries]),
        lengths,
        [entry.origin for entry in whole],
        [entry.rest for entry in whole],
        [entry.text_bytes for entry in whole],
        source=source,
        numbers=[entry.number for entry in whole],
    )
