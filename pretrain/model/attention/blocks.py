"""What is computed together, in packed coordinates: the plan of `qblock` and `sdpa`. PURE: no torch.

Takes document lengths of both sides and the limits -> blocks of queries of one document, and tiles of short
documents of about one length, that together hold every visible pair. Rows times keys times heads stay within
a budget, so that the memory of the scores does not grow with the length of a document. How a document is cut
or widened depends on its own lengths alone, so its result does not depend on its neighbours. Source: own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

MAX_ROWS = 512
MAX_SCORES = 1 << 22  # elements of one [H, rows, keys] matrix: 16 MB in fp32
MIN_ROWS = 16
# Documents up to 128 tokens spend more time between kernels than in them; 32 wastes few places of a tile.
TILE_STEP, TILE_LONGEST = 32, 128


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


@dataclass(frozen=True, slots=True)
class Side:
    """Queries or keys of the documents of a tile: where each begins and how long it is."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    width: int  # to which each is widened


@dataclass(frozen=True, slots=True)
class Tile:
    """Short documents computed as a batch, each widened at its end to the width of its side."""

    queries: Side
    keys: Side


def plan_tiles(
    q_lengths: Sequence[int],
    k_lengths: Sequence[int],
    *,
    same_places: bool,
    num_heads: int,
    max_scores: int = MAX_SCORES,
) -> tuple[list[Tile], list[int]]:
    """Tiles of the short documents, and the numbers of the others.

    Args:
        same_places: the rules count distances, so the ends of both sides must be aligned by being equally long.
    """
    alike: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    others, q_start, k_start = [], 0, 0
    for number, (q_length, k_length) in enumerate(zip(q_lengths, k_lengths, strict=True)):
        if max(q_length, k_length) > TILE_LONGEST or (same_places and q_length != k_length):
            others.append(number)
        else:
            widths = -(-q_length // TILE_STEP) * TILE_STEP, -(-k_length // TILE_STEP) * TILE_STEP
            alike.setdefault(widths, []).append((q_start, q_length, k_start, k_length))
        q_start, k_start = q_start + q_length, k_start + k_length
    tiles = []
    for (q_width, k_width), documents in alike.items():
        most = max(1, max_scores // (num_heads * q_width * k_width))
        for first in range(0, len(documents), most):
            q_starts, q_own, k_starts, k_own = zip(*documents[first : first + most], strict=True)
            tiles.append(Tile(Side(q_starts, q_own, q_width), Side(k_starts, k_own, k_width)))
    return tiles, others


def plan_blocks(
    q_lengths: Sequence[int],
    k_lengths: Sequence[int],
    *,
    causal: bool,
    window: int | None,
    num_heads: int,
    only: Collection[int] | None = None,
    max_rows: int = MAX_ROWS,
    max_scores: int = MAX_SCORES,
) -> list[Block]:
    """The blocks of all documents, or of those in `only`, in order; queries that see no key at all are in none."""
    blocks = []
    q_start = k_start = 0
    for number, (q_length, k_length) in enumerate(zip(q_lengths, k_lengths, strict=True)):
        if only is not None and number not in only:
            q_start, k_start = q_start + q_length, k_start + k_length
            continue
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
