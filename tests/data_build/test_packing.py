from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.packing import BlockCutter, CutBlock, FirstFitPacker, lay_out_rows

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


@settings(derandomize=True, deadline=None, max_examples=80)
@given(lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 14)), max_size=60), open_rows=st.integers(1, 6))
def test_first_fit_loses_no_pair_and_keeps_a_slot_free_on_each_side(
    lengths: list[tuple[int, int]], open_rows: int
) -> None:
    packer = FirstFitPacker(10, 15, open_rows=open_rows)
    closed = [packer.add(number, *pair) for number, pair in enumerate(lengths)]
    rows = [row for row in closed if row is not None] + list(packer.finish())
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    for row in rows:
        assert row == sorted(row)
        assert sum(lengths[number][0] for number in row) <= 9
        assert sum(lengths[number][1] for number in row) <= 14


def test_with_rows_enough_the_packer_is_plain_first_fit() -> None:
    rng = random.Random(3)
    lengths = [(rng.randint(1, 9), rng.randint(1, 14)) for _ in range(200)]
    rows: list[list[int]] = []
    for number, (source, target) in enumerate(lengths):
        for row in rows:
            if (
                sum(lengths[other][0] for other in row) + source <= 9
                and sum(lengths[other][1] for other in row) + target <= 14
            ):
                row.append(number)
                break
        else:
            rows.append([number])
    packer = FirstFitPacker(10, 15, open_rows=1000)
    assert all(packer.add(number, *pair) is None for number, pair in enumerate(lengths))
    assert list(packer.finish()) == rows


def test_short_pairs_fill_rows_well() -> None:
    rng = random.Random(0)
    packer = FirstFitPacker(129, 129)
    lengths = [(rng.randint(3, 40), rng.randint(3, 40)) for _ in range(3000)]
    rows = [row for number, pair in enumerate(lengths) if (row := packer.add(number, *pair))] + list(packer.finish())
    fill = sum(map(sum, lengths)) / (len(rows) * 256)
    assert fill > 0.9


def test_a_pair_longer_than_a_row_is_refused() -> None:
    for pair in ((10, 1), (1, 15)):
        with pytest.raises(ValueError, match="exceeds"):
            FirstFitPacker(10, 15).add(0, *pair)


def test_rows_lie_at_fixed_places_with_padding_between() -> None:
    rows = [[np.array([5, 6]), np.array([7])], [np.array([8, 9])]]
    ids, ends = lay_out_rows(rows, rows_per_block=3, capacity=5, pad_id=PAD)
    assert ids.tolist() == [5, 6, 7, PAD, PAD, 8, 9, PAD, PAD, PAD] + [PAD] * 5
    assert ends.tolist() == [2, 3, 7]
