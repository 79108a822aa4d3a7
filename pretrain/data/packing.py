"""PURE: documents -> blocks. Concatenate and cut (plain text), or whole documents best fitted into rows.

Takes ids with document lengths, in corpus order and in pieces of any size -> gives blocks that do
not depend on how the input was divided; takes the lengths of one window of documents -> gives its rows.
Documents already end with the end-of-document id.
Invariants: concatenation loses no token and adds padding to the last block only; rows keep their capacity on
every side, and hold each document of the window whole and once; a window is packed by itself, so
windows can be packed anywhere and memory is one window.
Source: row by row, the best fitting document next (arXiv:2404.10830 fits documents to rows); on two sides the
document that is large along what is still free and leaves both sides equally free (own).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

WINDOW_DOCUMENTS = 65536
OverLong = Literal["fail", "drop", "cut", "split"]


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
    """Concatenates documents and cuts blocks off the front.

    Args:
        continued: the first document that is added began in an earlier block.
    """

    def __init__(self, block_tokens: int, *, eos_id: int, pad_id: int, continued: bool = False) -> None:
        self._block_tokens = block_tokens
        self._eos_id, self._pad_id = eos_id, pad_id
        self._ids = np.zeros(0, dtype=np.uint32)
        self._ends = np.zeros(0, dtype=np.int64)
        self._first_document = 0
        self._continued = continued

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


@dataclass(frozen=True, slots=True)
class Fitted:
    """Documents as rows can hold them: one entry per document, or per piece of one.

    Attributes:
        document: [E] index of the document.
        start: [E] its first token in the document.
        lengths: [E, sides] tokens.
        final: [E] the document ends here; False for a piece that others follow.
        dropped, shortened: documents that were left out, or lost their end.
    """

    document: NDArray[np.int64]
    start: NDArray[np.int64]
    lengths: NDArray[np.int64]
    final: NDArray[np.bool_]
    dropped: int
    shortened: int


def fit_documents(lengths: NDArray[np.int64], limits: Sequence[int], over_long: OverLong) -> Fitted:
    """Entries of at most `limits` tokens, in order.

    Args:
        lengths: [N, sides] tokens of each document, end token included.
        over_long: what happens to a document that is longer on any side. `drop` leaves it out; `cut` keeps as much of
            each side as fits (the caller ends it with eos); `split` (one side) makes pieces that lose no token.
            `fail` leaves it out too: the caller refuses when `dropped` is not 0.
    """
    most = np.asarray(limits, dtype=np.int64)
    too_long = (lengths > most).any(axis=1)
    everyone = np.arange(len(lengths), dtype=np.int64)
    if over_long == "split":
        if lengths.shape[1] != 1:
            raise ValueError("only documents of one side are split")
        pieces = -(-lengths[:, 0] // most[0])
        document = np.repeat(everyone, pieces)
        number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        start = number * most[0]
        sizes = np.minimum(lengths[document, 0] - start, most[0])[:, None]
        return Fitted(document, start, sizes, number == pieces[document] - 1, 0, 0)
    document = everyone if over_long == "cut" else everyone[~too_long]
    start, final = np.zeros(len(document), dtype=np.int64), np.ones(len(document), dtype=np.bool_)
    left_out = len(lengths) - len(document)
    shortened = int(too_long.sum()) if over_long == "cut" else 0
    return Fitted(document, start, np.minimum(lengths[document], most), final, left_out, shortened)


def pack_window(lengths: NDArray[np.int64], limits: Sequence[int]) -> list[list[int]]:
    """Rows of one window of documents.

    Args:
        lengths: [N, sides] tokens of each document, one or two sides, 1..limit.
        limits: tokens that a row holds, per side.

    Returns:
        Documents 0..N-1, each in one row; ascending within a row.

    Raises:
        ValueError: a document that no row holds.
    """
    if len(lengths) and ((lengths < 1) | (lengths > np.asarray(limits))).any():
        raise ValueError(f"documents of 1..{tuple(limits)} tokens are packed, got up to {lengths.max(axis=0).tolist()}")
    rows = _pack_one_side(lengths[:, 0], limits[0]) if len(limits) == 1 else _pack_two_sides(lengths, limits)
    for row in rows:
        row.sort()
    return rows


def _stacks(groups: NDArray[np.int64], num_groups: int) -> list[list[int]]:
    """Members of each group, the first one last, so that `pop` gives them in order."""
    order = np.argsort(groups, kind="stable")
    ends = np.cumsum(np.bincount(groups, minlength=num_groups))
    return [part[::-1].tolist() for part in np.split(order, ends[:-1])] if num_groups else []


def _pack_one_side(lengths: NDArray[np.int64], limit: int) -> list[list[int]]:
    """Each row takes the longest document that still fits, until none does."""
    stacks = _stacks(lengths, limit + 1)
    below = list(range(-1, limit))  # from a length to a smaller one, nothing left between; paths are shortened
    rows: list[list[int]] = []
    left = len(lengths)

    def longest(at_most: int) -> int:
        """The greatest length up to this one of which a document is left, or 0."""
        passed = []
        while at_most and not stacks[at_most]:
            passed.append(at_most)
            at_most = below[at_most]
        for length in passed:
            below[length] = at_most
        return at_most

    while left:
        row, free = [], limit
        while (length := longest(free)) > 0:
            row.append(stacks[length].pop())
            free -= length
        rows.append(row)
        left -= len(row)
    return rows


def _pack_two_sides(lengths: NDArray[np.int64], limits: Sequence[int]) -> list[list[int]]:
    """Each row takes the documents that are largest along its free space and keep both sides equally free."""
    types, groups = np.unique(lengths, axis=0, return_inverse=True)
    stacks = _stacks(groups.reshape(-1).astype(np.int64), len(types))
    left = np.array([len(stack) for stack in stacks])
    # Integers throughout: a side's slots count `1 / its limit` each, scaled to one common unit.
    weights = np.array([limits[1], limits[0]], dtype=np.int64)
    first, second = types[:, 0].copy(), types[:, 1].copy()
    wide, high = first * weights[0], second * weights[1]
    rows: list[list[int]] = []
    while True:
        row: list[int] = []
        a, b = int(limits[0]), int(limits[1])
        fitting = np.flatnonzero(left)
        if not fitting.size:
            return rows
        unit = a * int(weights[0])
        while fitting.size:
            free_a, free_b = a * int(weights[0]), b * int(weights[1])
            x, y = wide[fitting], high[fitting]
            score = x * free_a + y * free_b - unit * np.abs((free_a - free_b) - (x - y))
            chosen = int(fitting[score.argmax()])
            row.append(stacks[chosen].pop())
            left[chosen] -= 1
            a -= int(first[chosen])
            b -= int(second[chosen])
            fitting = fitting[(first[fitting] <= a) & (second[fitting] <= b) & (left[fitting] > 0)]
        rows.append(row)


def lay_out(
    row: NDArray[np.int64], lengths: NDArray[np.int64], capacity: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(first slot, slot behind the last) of each entry on one side; row i owns slots i * capacity and following.

    Args:
        row: [E] ascending.
        lengths: [E] tokens.
    """
    ends = np.cumsum(lengths)
    first_of_row = np.searchsorted(row, row, side="left")
    before = np.append(0, ends)[first_of_row]
    stop = ends - before + row * capacity
    return stop - lengths, stop
