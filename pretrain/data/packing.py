"""PURE: documents -> blocks. Concatenate and cut (plain text), or first-fit rows that are never cut (pairs).

Takes ids with document lengths, in corpus order and in pieces of any size -> gives blocks that do
not depend on how the input was divided. Documents already end with the end-of-document id.
Invariants: concatenation loses no token and adds padding to the last block only; a packed row keeps
at least one slot free on each side, holds whole pairs, and as many documents on one side as on the other.
Source: first fit as in best-fit-style packing (arXiv:2404.10830), with a bounded number of open rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

OPEN_ROWS = 256


@dataclass(frozen=True, slots=True)
class CutBlock:
    """A block cut from the concatenated documents.

    Attributes:
        ids: [block_tokens + 1]; the last is the next block's first, or eos after the last block.
        ends: ascending document ends inside the block, exclusive, 1..block_tokens.
        first_document: number in the corpus of the first document that has tokens here.
        num_documents: documents with tokens here; one more than `ends` if the last goes on.
        continued: the first document began in an earlier block.
        real_tokens: tokens before the padding.
    """

    ids: np.ndarray
    ends: np.ndarray
    first_document: int
    num_documents: int
    continued: bool
    real_tokens: int


class BlockCutter:
    """Concatenates documents and cuts blocks off the front."""

    def __init__(self, block_tokens: int, *, eos_id: int, pad_id: int) -> None:
        self._block_tokens = block_tokens
        self._eos_id, self._pad_id = eos_id, pad_id
        self._ids = np.zeros(0, dtype=np.uint32)
        self._ends = np.zeros(0, dtype=np.int64)
        self._first_document = 0
        self._continued = False

    def add(self, ids: np.ndarray, lengths: np.ndarray) -> Iterator[CutBlock]:
        """Appends documents and yields the blocks that are full and whose next token is known."""
        carried = len(self._ids)
        all_ids = np.concatenate([self._ids, ids])
        ends = np.concatenate([self._ends, carried + np.cumsum(lengths, dtype=np.int64)])
        start, done = 0, 0
        while len(all_ids) - start > self._block_tokens:
            stop = start + self._block_tokens
            upto = int(np.searchsorted(ends, stop, side="right"))
            goes_on = upto == done or int(ends[upto - 1]) != stop
            yield self._block(all_ids[start : stop + 1], ends[done:upto] - start, goes_on, self._block_tokens)
            start, done = stop, upto
        self._ids, self._ends = all_ids[start:].copy(), ends[done:] - start

    def finish(self) -> Iterator[CutBlock]:
        """The last block, filled with padding, if any token is left."""
        real = len(self._ids)
        if real:
            ids = np.full(self._block_tokens + 1, self._pad_id, dtype=self._ids.dtype)
            ids[:real] = self._ids
            ids[-1] = self._eos_id
            yield self._block(ids, self._ends, False, real)
            self._ids = self._ids[:0]

    def _block(self, ids: np.ndarray, ends: np.ndarray, goes_on: bool, real_tokens: int) -> CutBlock:
        block = CutBlock(ids, ends, self._first_document, len(ends) + goes_on, self._continued, real_tokens)
        self._first_document += len(ends)
        self._continued = goes_on
        return block


class FirstFitPacker:
    """Puts pairs into rows of two capacities; a pair goes into the first open row where both sides fit.

    At most `OPEN_ROWS` rows are open: when none fits, the fullest is closed to make place.
    """

    def __init__(self, source_capacity: int, target_capacity: int, *, open_rows: int = OPEN_ROWS) -> None:
        self._limits = (source_capacity - 1, target_capacity - 1)
        self._open_rows = open_rows
        self._free = np.zeros((2, 0), dtype=np.int64)
        self._rows: list[list[int]] = []

    def add(self, document: int, source_length: int, target_length: int) -> list[int] | None:
        """Places one pair -> the documents of a row that was closed for it, if any.

        Raises:
            ValueError: the pair is longer than a row.
        """
        if source_length > self._limits[0] or target_length > self._limits[1]:
            raise ValueError(f"pair of {source_length} and {target_length} tokens exceeds {self._limits}")
        fits = (self._free[0] >= source_length) & (self._free[1] >= target_length)
        closed = None
        if fits.any():
            row = int(fits.argmax())
        elif len(self._rows) < self._open_rows:
            row = len(self._rows)
            self._rows.append([])
            self._free = np.column_stack([self._free, self._limits])
        else:
            row = int(self._free.sum(axis=0).argmin())
            closed, self._rows[row] = self._rows[row], []
            self._free[:, row] = self._limits
        self._rows[row].append(document)
        self._free[0, row] -= source_length
        self._free[1, row] -= target_length
        return closed

    def finish(self) -> Iterator[list[int]]:
        """The rows that are still open, in the order of their first document."""
        yield from sorted(self._rows)
        self._rows, self._free = [], self._free[:, :0]


def lay_out_rows(
    rows: Sequence[Sequence[np.ndarray]], rows_per_block: int, capacity: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """One side of a block of pairs: (ids [rows_per_block * capacity], ends absolute in the block).

    Row i owns slots [i * capacity, (i + 1) * capacity); what its documents leave free is padding.
    """
    ids = np.full(rows_per_block * capacity, pad_id, dtype=np.uint32)
    ends: list[int] = []
    for number, documents in enumerate(rows):
        position = number * capacity
        for document in documents:
            ids[position : position + len(document)] = document
            position += len(document)
            ends.append(position)
    return ids, np.array(ends, dtype=np.int64)
