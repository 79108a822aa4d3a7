from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.packing import BlockCutter, CutBlock, fit_documents, lay_out, pack_window

EOS, PAD = 0, 1
LENGTHS = st.lists(st.integers(1, 23), min_size=1, max_size=40)


def _numbered(lengths: list[int]) -> list[list[int]]:
    """Documents of different ids, each ending with EOS."""
    first, documents = 100, []
    for length in lengths:
        documents.append([*range(first, first + length - 1), EOS])
        first += length
    return documents


def _cut(documents: list[list[int]], pieces: int, block_tokens: int) -> list[CutBlock]:
    cutter = BlockCutter(block_tokens, eos_id=EOS, pad_id=PAD)
    blocks: list[CutBlock] = []
    for piece in np.array_split(np.arange(len(documents)), pieces):
        chosen = [documents[number] for number in piece]
        flat = np.array([token for document in chosen for token in document], dtype=np.uint32)
        blocks += cutter.add(flat, np.array([len(document) for document in chosen], dtype=np.int64))
    return blocks + list(cutter.finish())


@settings(derandomize=True, deadline=None, max_examples=150)
@given(lengths=LENGTHS, pieces=st.integers(1, 7), block_tokens=st.integers(2, 30))
def test_blocks_are_the_concatenation_cut_at_fixed_places(lengths: list[int], pieces: int, block_tokens: int) -> None:
    documents = _numbered(lengths)
    stream = [token for document in documents for token in document]
    owner = [number for number, document in enumerate(documents) for _ in document]
    blocks = _cut(documents, pieces, block_tokens)
    assert len(blocks) == -(-len(stream) // block_tokens)
    for number, block in enumerate(blocks):
        start, stop = number * block_tokens, min((number + 1) * block_tokens, len(stream))
        padding = [PAD] * (block_tokens - (stop - start))
        following = stream[stop] if stop < len(stream) else EOS
        assert block.ids.tolist() == [*stream[start:stop], *padding, following]
        assert block.ends.tolist() == [at - start + 1 for at in range(start, stop) if stream[at] == EOS]
        assert block.real_tokens == stop - start
        assert block.first_document == owner[start]
        assert block.num_documents == owner[stop - 1] - owner[start] + 1
        assert block.continued == (start > 0 and stream[start - 1] != EOS)


PAIRS = st.lists(st.tuples(st.integers(1, 14), st.integers(1, 9)), max_size=60)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(lengths=PAIRS)
def test_pairs_are_packed_once_whole_and_within_both_capacities(lengths: list[tuple[int, int]]) -> None:
    rows = pack_window(np.array(lengths, dtype=np.int64).reshape(-1, 2), (14, 9))
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    for row in rows:
        assert row == sorted(row)
        assert sum(lengths[number][0] for number in row) <= 14
        assert sum(lengths[number][1] for number in row) <= 9
    assert pack_window(np.array(lengths, dtype=np.int64).reshape(-1, 2), (14, 9)) == rows


@settings(derandomize=True, deadline=None, max_examples=100)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_rows_of_one_side_are_those_of_a_plain_loop(lengths: list[int]) -> None:
    """Independent: the longest document left that fits, by looking at all of them."""
    left = list(range(len(lengths)))
    expected = []
    while left:
        row: list[int] = []
        while fitting := [n for n in left if lengths[n] <= 20 - sum(lengths[other] for other in row)]:
            chosen = max(fitting, key=lambda n: (lengths[n], -n))
            row.append(chosen)
            left.remove(chosen)
        expected.append(sorted(row))
    assert pack_window(np.array(lengths, dtype=np.int64)[:, None], (20,)) == expected


def test_short_pairs_fill_nearly_every_slot() -> None:
    rng = random.Random(0)
    sources = [min(2 + int(rng.expovariate(0.15)), 100) for _ in range(8000)]
    lengths = np.array([(source, max(2, round(source * rng.uniform(0.7, 1.4)))) for source in sources])
    capacity = 128
    other = round(capacity * lengths[:, 1].sum() / lengths[:, 0].sum())
    rows = pack_window(lengths, (capacity - 1, other - 1))
    assert lengths.sum() / (len(rows) * (capacity + other)) > 0.97


def test_documents_longer_than_a_row_are_refused_by_the_packer() -> None:
    for pair in ((10, 1), (1, 15), (0, 1)):
        with pytest.raises(ValueError, match="are packed, got"):
            pack_window(np.array([pair]), (9, 14))


@settings(derandomize=True, deadline=None, max_examples=100)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=30), limit=st.integers(1, 20))
def test_over_long_documents_are_dropped_cut_or_split_as_told(lengths: list[int], limit: int) -> None:
    column = np.array(lengths, dtype=np.int64)[:, None]
    fits = [number for number, length in enumerate(lengths) if length <= limit]
    dropped = fit_documents(column, (limit,), "drop")
    assert dropped.document.tolist() == fits
    assert dropped.dropped == len(lengths) - len(fits)
    cut = fit_documents(column, (limit,), "cut")
    assert cut.lengths[:, 0].tolist() == [min(length, limit) for length in lengths]
    assert (cut.shortened, cut.dropped) == (len(lengths) - len(fits), 0)
    split = fit_documents(column, (limit,), "split")
    tokens = [
        (document, start + place)
        for document, start, length in zip(
            split.document.tolist(), split.start.tolist(), split.lengths[:, 0].tolist(), strict=True
        )
        for place in range(length)
    ]
    assert tokens == [(number, place) for number, length in enumerate(lengths) for place in range(length)]
    assert split.lengths.max() <= limit
    assert split.final.sum() == len(lengths)
    assert (split.dropped, split.shortened) == (0, 0)


def test_a_pair_is_cut_on_each_side_alone_and_never_split() -> None:
    lengths = np.array([[5, 30], [3, 4], [30, 30]])
    cut = fit_documents(lengths, (10, 20), "cut")
    assert cut.lengths.tolist() == [[5, 20], [3, 4], [10, 20]]
    assert cut.shortened == 2
    with pytest.raises(ValueError, match="one side"):
        fit_documents(lengths, (10, 20), "split")


def test_rows_lie_at_fixed_places() -> None:
    start, stop = lay_out(np.array([0, 0, 2, 2, 2]), np.array([2, 1, 3, 1, 1]), 5)
    assert start.tolist() == [0, 2, 10, 13, 14]
    assert stop.tolist() == [2, 3, 13, 14, 15]
