"""Random numbers of an objective: element i of stream `key` as a pure function, the same for ever. PURE.

Takes a 64-bit key and a count -> gives uniform numbers. Own (SplitMix64, see `permutation`), because a
library's stream may change between versions, and what a row was masked to must not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pretrain.data.permutation import U64, derive_key, mix_keys


def words(key: int, count: int) -> U64:
    """uint64 [count], uniform."""
    return mix_keys(np.full(count, key, dtype=np.uint64), np.arange(count, dtype=np.int64))


def uniforms(key: int, count: int) -> NDArray[np.float64]:
    """float64 [count] in [0, 1)."""
    return (words(key, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def row_key(seed: int, step: int, index: int, row: int) -> int:
    """Key of what is random in row `row` of micro-batch `index` of a step: the same whoever computes it."""
    return derive_key("objective 1", seed, step, index, row)


def validation_key(row: int) -> int:
    """Key of a held-out row: the same at every validation, in every run, at any micro-batch size."""
    return derive_key("objective validation 1", row)
