"""Keyed permutations against a plain re-implementation and golden digests."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from pretrain.data.permutation import derive_key, mix_keys, permute

M64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def finalise(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


def plain_permutation(size: int, key: int) -> list[int]:
    """The rule in plain integers, one element after the other."""
    if size <= 64:
        return sorted(range(size), key=lambda i: (finalise((key + (i + 1) * GOLDEN) & M64), i))
    bits = (size - 1).bit_length()
    low_bits, high_bits = bits // 2, bits - bits // 2

    def network(x: int) -> int:
        low, high = x & ((1 << low_bits) - 1), x >> low_bits
        for number in range(8):
            k = finalise((key + (number + 1) * GOLDEN) & M64)
            if number % 2:
                high ^= finalise((low + k) & M64) & ((1 << high_bits) - 1)
            else:
                low ^= finalise((high + k) & M64) & ((1 << low_bits) - 1)
        return high << low_bits | low

    out = []
    for x in range(size):
        x = network(x)
        while x >= size:
            x = network(x)
        out.append(x)
    return out


@pytest.mark.parametrize("size", [1, 2, 3, 7, 63, 64, 65, 100, 127, 128, 129, 1000])
def test_a_permutation_equals_its_plain_definition(size: int) -> None:
    for key in (0, 1, derive_key("a", 3), M64):
        got = permute(np.arange(size), size, np.full(size, key, dtype=np.uint64))
        assert got.tolist() == plain_permutation(size, key)
        assert sorted(got.tolist()) == list(range(size))


def test_many_keys_at_once_give_what_each_gives_alone() -> None:
    keys = np.array([derive_key(i) for i in range(40)], dtype=np.uint64)
    for size in (50, 200):
        positions = np.arange(40) % size
        together = permute(positions, size, keys)
        alone = [int(permute(positions[i : i + 1], size, keys[i : i + 1])[0]) for i in range(40)]
        assert together.tolist() == alone


@pytest.mark.parametrize("size", [6, 130])
def test_every_element_is_equally_likely_at_every_place(size: int) -> None:
    trials = 200 * size
    keys = np.array([derive_key("uniform", i) for i in range(trials)], dtype=np.uint64)
    for position in (0, size // 2, size - 1):
        counts = np.bincount(permute(np.full(trials, position), size, keys), minlength=size)
        chi_square = float(((counts - 200) ** 2 / 200).sum())
        assert abs(chi_square - (size - 1)) < 6 * np.sqrt(2 * (size - 1))


def test_sub_keys_differ_by_every_value_and_by_their_order() -> None:
    base = np.full(4, derive_key("x"), dtype=np.uint64)
    a, b = np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1])
    assert len(set(mix_keys(base, a, b).tolist())) == 4
    assert mix_keys(base, a, b)[1] != mix_keys(base, b, a)[1]


def test_the_bits_of_keys_and_permutations_never_change() -> None:
    assert derive_key("pretrain row order 1", 7, "prose", "blocks") == 6515184369283758351
    digest = hashlib.sha256()
    for size in (1, 5, 64, 65, 1000, 100_003, (1 << 40) + 12345):
        count = min(size, 1000)
        positions = np.linspace(0, size - 1, count).astype(np.int64)
        keys = mix_keys(np.full(count, derive_key("golden", size), dtype=np.uint64), np.arange(count) // 100)
        digest.update(permute(positions, size, keys).astype("<i8").tobytes())
    assert digest.hexdigest() == "fddb449891a64f8a254c91abebd97c55200ec2dcc1622be33d86e1a6f0529d9d"
