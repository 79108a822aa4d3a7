"""Which keys a block of queries can see, in packed coordinates: the plan of `blocked`. PURE: no torch.

Takes document lengths of both sides and the limits -> blocks that together hold every visible pair. A
block never crosses a document edge, and its rows times its keys times the heads stay within a budget,
so that the memory of the scores does not grow with the length of a document. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_ROWS = 512
MAX_SCORES = 1 << 22  # elements of one [H, rows, keys] matrix: 16 MB in fp32
MIN_ROWS = 16


@dataclass(frozen=True, slots=True)
class Block:
    """Queries [q_start, q_stop) of one document against its keys [k_start, k_stop).

    Attributes:
        distance: place of the first query minus place of the first key, ends of the documents aligned.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    distance: int

    @property
    def rows(self) -> int:
        return self.q_stop - self.q_start

    @property
    def keys(self) -> int:
        return self.k_stop - self.k_start

    def sees_all(self, causal: bool, window: int | None) -> bool:
        """May every query of the block see every key of it?"""
        first, last = self.distance - (self.keys - 1), self.distance + self.rows - 1
        if causal:
            return first >= 0 and (window is None or last < window)
        return window is None or max(-first, last) < window

    def has_blind_rows(self, causal: bool, window: int | None) -> bool:
        """Is there a query in it that sees no key?"""
        if causal and self.distance < 0:
            return True
        if window is None:
            return False
        return self.distance <= -window or self.distance + self.rows - self.keys >= window


def plan_blocks(
    q_lengths: Sequence[int],
    k_lengths: Sequence[int],
    *,
    causal: bool,
    window: int | None,
    num_heads: int,
    max_rows: int = MAX_ROWS,
    max_scores: int = MAX_SCORES,
) -> list[Block]:
    """The blocks of all documents, in order; queries that see no key at all are in none."""
    blocks = []
    q_start = k_start = 0
    for q_length, k_length in zip(q_lengths, k_lengths, strict=True):
        lag = k_length - q_length
        span = k_length if window is None else min(k_length, max_rows + (1 if causal else 2) * window)
        rows = max(MIN_ROWS, min(max_rows, max_scores // (num_heads * span)))
        for first in range(0, q_length, rows):
            stop = min(first + rows, q_length)
            low = 0 if window is None else max(0, first + lag - window + 1)
            high = k_length
            if causal:
                high = min(high, stop + lag)
            elif window is not None:
                high = min(high, stop - 1 + lag + window)
            if high > low:
                blocks.append(Block(q_start + first, q_start + stop, k_start + low, k_start + high, first + lag - low))
        q_start, k_start = q_start + q_length, k_start + k_length
    return blocks
