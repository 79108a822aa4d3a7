"""The plan of query blocks against a pair-by-pair count, and its bound on memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.model.attention.blocks import MIN_ROWS, plan_blocks

DOCUMENTS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4)


def visible(i: int, j: int, q_length: int, k_length: int, causal: bool, window: int | None) -> bool:
    distance = i + k_length - q_length - j
    return (distance >= 0 or not causal) and (window is None or abs(distance) < window)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(documents=DOCUMENTS, causal=st.booleans(), window=st.none() | st.integers(1, 50), max_rows=st.integers(1, 20))
def test_every_visible_pair_is_in_exactly_one_block_with_its_distance(
    documents: list[tuple[int, int]], causal: bool, window: int | None, max_rows: int
) -> None:
    q_lengths, k_lengths = zip(*documents, strict=True)
    blocks = plan_blocks(q_lengths, k_lengths, causal=causal, window=window, num_heads=2, max_rows=max_rows)
    held: dict[tuple[int, int], int] = {}
    for block in blocks:
        for i in range(block.q_start, block.q_stop):
            for j in range(block.k_start, block.k_stop):
                assert (i, j) not in held
                held[i, j] = block.distance + (i - block.q_start) - (j - block.k_start)
    q_start = k_start = 0
    for q_length, k_length in documents:
        for i in range(q_length):
            for j in range(k_length):
                if visible(i, j, q_length, k_length, causal, window):
                    assert held[q_start + i, k_start + j] == i + k_length - q_length - j
        q_start, k_start = q_start + q_length, k_start + k_length
    for block in blocks:  # inside one document, and what it says of itself
        distances = {
            i: [held[i, j] for j in range(block.k_start, block.k_stop)] for i in range(block.q_start, block.q_stop)
        }
        seen = {
            i: [(d >= 0 or not causal) and (window is None or abs(d) < window) for d in row]
            for i, row in distances.items()
        }
        assert block.sees_all(causal, window) == all(all(row) for row in seen.values())
        assert block.has_blind_rows(causal, window) == any(not any(row) for row in seen.values())


@pytest.mark.parametrize("length", [1000, 16384, 100_000])
def test_scores_stay_within_the_budget_whatever_the_length(length: int) -> None:
    blocks = plan_blocks([length], [length], causal=True, window=None, num_heads=8, max_scores=1 << 22)
    assert all(block.rows * block.keys * 8 <= 1 << 22 or block.rows == MIN_ROWS for block in blocks)
    narrow = plan_blocks([length], [length], causal=True, window=256, num_heads=8)
    assert max(block.keys for block in narrow) <= 256 + 512
