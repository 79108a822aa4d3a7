"""Stage of a build: one window of documents -> its rows.

Takes the window's number -> gives the number of its rows; the table itself is a file, see `RowTable`. A pure
function of the documents' lengths and the layout; see `tasks`. Windows are counted in documents of the
corpus, so they do not depend on how parts divide it.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np

from pretrain.data.format import Manifest
from pretrain.data.packing import WINDOW_DOCUMENTS, fit_documents, pack_window
from pretrain.data.part import load_lengths, part_infos
from pretrain.data.permutation import derive_key, mix_keys
from pretrain.data.tick import Tick
from pretrain.store import Store


@dataclass(frozen=True, slots=True)
class RowTable:
    """The entries of some rows, row by row.

    Attributes:
        number: [E] place of the document in the corpus.
        start: [E] first token in the document.
        lengths: [E, sides] tokens.
        final: [E] whether the document ends here.
        row: [E] ascending.
    """

    number: np.ndarray
    start: np.ndarray
    lengths: np.ndarray
    final: np.ndarray
    row: np.ndarray

    def save(self, store: Store, key: str) -> None:
        buffer = BytesIO()
        for array in (self.number, self.start, self.lengths, self.final, self.row):
            np.save(buffer, array, allow_pickle=False)
        store.put(key, buffer.getvalue())

    @classmethod
    def load(cls, store: Store, key: str) -> RowTable:
        buffer = BytesIO(store.get(key))
        return cls(*(np.load(buffer, allow_pickle=False) for _ in range(5)))

    def rows(self, first: int, stop: int) -> RowTable:
        """Rows first..stop-1, numbered from 0."""
        low, high = np.searchsorted(self.row, [first, stop])
        chosen = slice(low, high)
        return RowTable(
            self.number[chosen], self.start[chosen], self.lengths[chosen], self.final[chosen], self.row[chosen] - first
        )


def row_limits(header: Manifest) -> tuple[int, ...]:
    """Tokens that a row holds on each side, the target's (or only) side first; a row of pairs keeps a slot free."""
    if header.kind == "pairs":
        return header.target_capacity - 1, header.source_capacity - 1
    return (header.row_tokens,)


def pack_documents(
    store: Store, folder: str, number: int, common: dict[str, Any], item: dict[str, Any], tick: Tick
) -> dict[str, Any]:
    """Packs one window.

    Args:
        common: limits, over_long.
        item: window, parts.
        tick: hears the tokens that were packed.
    """
    first = item["window"] * WINDOW_DOCUMENTS
    limits = common["limits"]
    numbers, lengths = _window_lengths(store, item, first, sides=len(limits))
    fitted = fit_documents(lengths, limits, common["over_long"])
    rows = pack_window(fitted.lengths, limits)
    # Rows come out sorted by what they hold; neighbours in a block should be a mixture.
    keys = mix_keys(
        np.full(len(rows), derive_key("packed rows", item["window"]), dtype=np.uint64), np.arange(len(rows))
    )
    rows = [rows[place] for place in np.argsort(keys, kind="stable").tolist()]
    entries = np.array([entry for row in rows for entry in row], dtype=np.int64)
    table = RowTable(
        number=numbers[fitted.document[entries]],
        start=fitted.start[entries],
        lengths=fitted.lengths[entries],
        final=fitted.final[entries],
        row=np.repeat(np.arange(len(rows)), [len(row) for row in rows]),
    )
    key = f"{folder}/{number:06d}.rows"
    table.save(store, key)
    tick(0, int(fitted.lengths.sum()))
    return {
        "key": key,
        "rows": len(rows),
        "dropped": fitted.dropped,
        "shortened": fitted.shortened,
        "longest": lengths.max(axis=0).tolist() if len(lengths) else [0] * len(limits),
    }


def _window_lengths(store: Store, item: dict[str, Any], first: int, sides: int) -> tuple[np.ndarray, np.ndarray]:
    """(corpus numbers, lengths [N, sides]) of a window's documents."""
    all_numbers, all_lengths = [np.zeros(0, dtype=np.int64)], [np.zeros((0, sides), dtype=np.int64)]
    for part in part_infos(item["parts"]):
        numbers, lengths, source_lengths = load_lengths(store, part)
        low, high = np.searchsorted(numbers, [first, first + WINDOW_DOCUMENTS])
        columns = (lengths, source_lengths)[:sides]
        all_numbers.append(numbers[low:high])
        all_lengths.append(np.column_stack([column[low:high] for column in columns]))
    return np.concatenate(all_numbers), np.concatenate(all_lengths)
