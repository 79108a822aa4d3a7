"""Stage of a build: a range of order keys -> its documents, merged from all runs, tokenised, as parts.

Takes (low, high) -> gives the parts of each split and counts. A pure function of runs and options; see `tasks`.
Invariants: memory is one range; every document ends with eos on each side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pretrain.data.histogram import add_lengths
from pretrain.data.part import PartBuilder
from pretrain.data.spill import Run, Spilled, read_range
from pretrain.data.tick import Tick
from pretrain.data.tokenizer import Tokenizer
from pretrain.data.trained_parts import encode_parts
from pretrain.store import Store

SPLITS = ("train", "validation")
_BATCH_BYTES = 2**20
_PART_TOKENS = 2**21


def encode_range(
    store: Store,
    folder: str,
    number: int,
    common: dict[str, Any],
    item: dict[str, Any],
    tick: Tick,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Encodes the documents of one range of slots.

    Args:
        common: runs, files (names by number), deduplicate, limit (hex of the selection's, or None), pairs, masked,
            dtype, range_bytes.
        item: low, high.
        tick: hears bytes of text as they are encoded.
    """
    encoding = _Encoding(store, f"{folder}/{number:06d}", common, tokenizer, tick)
    runs = [Run(*run) for run in common["runs"]]
    found = 0
    for documents in read_range(
        store,
        runs,
        item["low"],
        item["high"],
        deduplicate=common["deduplicate"],
        budget_bytes=2 * common["range_bytes"],
    ):
        limit = common["limit"]
        selected = [one for one in documents if limit is None or one.identity.hex() < limit]
        found += len(documents)
        for validation, split in enumerate(SPLITS):
            encoding.add(split, [one for one in selected if one.validation == validation])
    return encoding.close() | {"documents": found}


class _Encoding:
    """The parts of one range, by split."""

    def __init__(self, store: Store, prefix: str, common: dict[str, Any], tokenizer: Tokenizer, tick: Tick) -> None:
        self._store, self._prefix, self._common = store, prefix, common
        self._tokenizer, self._tick = tokenizer, tick
        self._builders = {split: PartBuilder(common["dtype"]) for split in SPLITS}
        self._parts: dict[str, list[list[Any]]] = {split: [] for split in SPLITS}
        self._lengths: dict[str, dict[str, int]] = {}
        self._text_bytes = 0

    def add(self, split: str, documents: Sequence[Spilled]) -> None:
        files, builder = self._common["files"], self._builders[split]
        for batch in _batches(documents):
            pairs = self._common["pairs"]
            sizes = [len(one.text) + (len(one.target or b"") if pairs else 0) for one in batch]
            source, trained = None, None
            if pairs:
                source = self._encode([one.text for one in batch])
                ids, lengths = self._encode([one.target or b"" for one in batch])
                add_lengths(self._lengths.setdefault("source", {}), source[1])
                add_lengths(self._lengths.setdefault("target", {}), lengths)
            else:
                if self._common["masked"]:
                    marks = [one.target or b"" for one in batch]
                    ids, lengths, trained = encode_parts(self._tokenizer, [one.text for one in batch], marks)
                else:
                    ids, lengths = self._encode([one.text for one in batch])
                add_lengths(self._lengths.setdefault("tokens", {}), lengths)
            origins = [files[one.file] for one in batch]
            builder.add(ids, lengths, origins, [one.rest for one in batch], sizes, source=source, trained=trained)
            self._text_bytes += sum(sizes)
            self._tick(sum(sizes), len(ids) + (0 if source is None else len(source[0])))
            if builder.tokens >= _PART_TOKENS:
                self._flush(split)
                builder = self._builders[split]

    def close(self) -> dict[str, Any]:
        for split in SPLITS:
            self._flush(split)
        return {"parts": self._parts, "lengths": self._lengths, "text_bytes": self._text_bytes}

    def _encode(self, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """(ids of all texts with eos after each, lengths with it)."""
        return self._tokenizer.encode_ended([text.decode() for text in texts])

    def _flush(self, split: str) -> None:
        builder = self._builders[split]
        if len(builder):
            part, parts = builder.build(), self._parts[split]
            key = f"{self._prefix}-{split}-{len(parts):03d}.part"
            part.save(self._store, key)
            parts.append([key, len(part.lengths), len(part.ids), len(part.source_ids)])
            self._builders[split] = PartBuilder(self._common["dtype"])


def _batches(documents: Sequence[Spilled]) -> Iterator[Sequence[Spilled]]:
    start = size = 0
    for stop, one in enumerate(documents, start=1):
        size += len(one.text) + len(one.target or b"")
        if size >= _BATCH_BYTES or stop == len(documents):
            yield documents[start:stop]
            start, size = stop, 0
