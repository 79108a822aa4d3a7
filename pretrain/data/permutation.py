"""Keyed permutations that never change: random access to one element, no array of the permuted size. PURE.

Takes positions, a size and 64-bit keys -> gives the permuted positions, for many keys at once.

Own, so that no library's random stream can move the order of a run: up to 64 elements by ranking
keyed hashes (uniform over the hashes), above that by a Feistel network of 8 rounds over the next
power of two with cycle walking (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood 2014). Golden digests in the
tests pin every bit.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

U64: TypeAlias = NDArray[np.uint64]
I64: TypeAlias = NDArray[np.int64]

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True).encode
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_ROUND_CONSTANTS = np.arange(1, 9, dtype=np.uint64) * _GOLDEN
_RANKED_SIZE = 64  # a Feistel network of fewer than 7 bits reaches too few permutations


def derive_key(*parts: int | str) -> int:
    """A 64-bit key from numbers and texts, the same on every machine and for ever."""
    text = ",".join([str(part) if type(part) is int else _encoded(part) for part in parts])  # JSON without its encoder
    return int.from_bytes(hashlib.blake2b(f"[{text}]".encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=1024)
def _encoded(part: int | str) -> str:
    return _encode(part)


def mix_keys(keys: U64, *values: I64) -> U64:
    """Keys of sub-permutations: each (key, values) gives its own, elementwise."""
    for value in values:
        keys = _finalise(keys + (value.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return keys


def permute(positions: I64, size: int, keys: U64) -> I64:
    """The element at each position of the permutation of `size` elements that its key names.

    Args:
        positions: int64 [n], 0 <= position < size.
        size: number of elements, at least 1.
        keys: uint64 [n], one key per position.
    """
    if size <= _RANKED_SIZE:
        return _permute_by_ranks(positions, size, keys)
    bits = (size - 1).bit_length()
    values = _feistel(positions.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(values >= size)
    while outside.size:  # at most half of the domain lies outside, so this halves each time
        values[outside] = _feistel(values[outside], bits, keys[outside])
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def _finalise(values: U64) -> U64:
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIER_1
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIER_2
    return values ^ (values >> np.uint64(31))


def _feistel(values: U64, bits: int, keys: U64) -> U64:
    """An unbalanced Feistel network on `bits` bits: each round xors a keyed hash of one half into the other."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = values & low_mask, values >> low_bits
    for number, constant in enumerate(_ROUND_CONSTANTS):
        round_keys = _finalise(keys + constant)
        if number % 2:
            high = high ^ (_finalise(low + round_keys) & high_mask)
        else:
            low = low ^ (_finalise(high + round_keys) & low_mask)
    return (high << low_bits) | low


def _permute_by_ranks(positions: I64, size: int, keys: U64) -> I64:
    elements = np.arange(1, size + 1, dtype=np.uint64) * _GOLDEN
    distinct, which = np.unique(keys, return_inverse=True)  # many rows share a key, and sorting is what takes time
    order = np.argsort(_finalise(distinct[:, None] + elements[None, :]), axis=1, kind="stable")
    return order[which, positions].astype(np.int64)
