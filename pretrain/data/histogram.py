"""Histograms of document lengths that add up. PURE.

Takes token counts -> gives counts by bin, four bins per doubling, as JSON can hold them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

_PER_DOUBLING = 4


def add_lengths(histogram: dict[str, int], lengths: np.ndarray) -> None:
    """Counts lengths (1 or more) into their bins."""
    bins, counts = np.unique(np.floor(_PER_DOUBLING * np.log2(lengths)).astype(np.int64), return_counts=True)
    for number, count in zip(bins.tolist(), counts.tolist(), strict=True):
        histogram[str(number)] = histogram.get(str(number), 0) + count


def merge_histograms(total: dict[str, dict[str, int]], other: Mapping[str, Mapping[str, int]]) -> None:
    """Adds the histograms of each side."""
    for side, histogram in other.items():
        mine = total.setdefault(side, {})
        for number, count in histogram.items():
            mine[number] = mine.get(number, 0) + count


def edges_and_counts(histogram: Mapping[str, int]) -> tuple[list[float], list[int]]:
    """Bin edges in tokens (one more than counts) over the whole range that occurs, and the count of each bin."""
    numbers = [int(number) for number in histogram]
    low, high = min(numbers), max(numbers)
    edges = [2.0 ** (number / _PER_DOUBLING) for number in range(low, high + 2)]
    return edges, [histogram.get(str(number), 0) for number in range(low, high + 1)]
