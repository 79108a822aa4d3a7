"""Objectives and packing against plain loops over documents."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pretrain.data.batch import BatchShape, dropout_key, empty_batch, make_batch, seq_info, sum_digests
from pretrain.data.objective import PackedRow, causal_lm_row, seq2seq_row
from pretrain.sequence import IGNORED_LABEL, SeqInfo
from tests.data_read.corpus import BYTE_LENGTHS, EOS, PAD, START, random_documents

LM = BatchShape(rows=2, sequence_length=8, source_length=None, pad_id=PAD, start_id=START)


def test_the_last_token_of_a_document_predicts_nothing_and_every_other_its_successor() -> None:
    ids = np.array([11, 12, EOS, 21, 22, 23, EOS, 31, 32], dtype=np.uint16)
    row = causal_lm_row(ids, np.array([3, 7]), 8)
    assert row.decoder_ids.tolist() == ids[:8].tolist()
    assert row.labels.tolist() == [12, EOS, -100, 22, 23, EOS, -100, 32]
    assert row.lengths.tolist() == [3, 4, 1]


def test_an_end_that_is_spelt_as_padding_stays_a_target_and_padding_is_none() -> None:
    """Tokenizers without a padding id pad with the end of documents (T04): what counts is the place."""
    ids = np.array([11, 12, EOS, *[EOS] * 6], dtype=np.uint16)
    row = causal_lm_row(ids, np.array([3]), 3)
    assert row.labels.tolist() == [12, EOS, -100]
    batch = make_batch([row, None], replace(LM, pad_id=EOS), np.ones(100, dtype=np.int64), index=0, key=1)
    assert batch.labels.tolist() == [12, EOS, -100, *[-100] * 13]
    assert batch.decoder_info.lengths == (3, 13)
    assert batch.decoder_info.padding


def test_a_row_inside_one_document_is_one_document_and_predicts_across_its_edge() -> None:
    row = causal_lm_row(np.arange(10, 19, dtype=np.uint16), np.array([], dtype=np.int64), 8)
    assert row.labels.tolist() == list(range(11, 19))
    assert row.lengths.tolist() == [8]


def test_a_document_that_ends_at_the_edge_predicts_nothing_there() -> None:
    row = causal_lm_row(np.arange(10, 19, dtype=np.uint16), np.array([8]), 8)
    assert row.labels.tolist() == [*range(11, 18), -100]
    assert row.lengths.tolist() == [8]


def test_every_token_of_a_document_but_its_first_is_a_target_once() -> None:
    documents = random_documents(40, 30, seed=3)
    stream = [t for d in documents for t in d]
    stream += [PAD] * (-len(stream) % 8)
    real = sum(map(len, documents))
    ends = np.cumsum([len(d) for d in documents])
    targets = []
    for start in range(0, len(stream), 8):
        inside = ends[(ends > start) & (ends <= start + 8)] - start
        num_real = min(max(real - start, 0), 8)
        row = causal_lm_row(np.array([*stream, PAD][start : start + 9]), inside, num_real)
        targets += row.labels[row.labels != IGNORED_LABEL].tolist()
    assert targets == [t for d in documents for t in d[1:]]


def test_the_decoder_reads_the_start_id_and_then_the_target_of_its_own_pair() -> None:
    row = seq2seq_row(
        np.array([5, 6, 7, EOS, 8, EOS, PAD, PAD], dtype=np.uint16),
        np.array([4, 6]),
        np.array([9, EOS, 10, 11, EOS, PAD], dtype=np.uint16),
        np.array([2, 5]),
        START,
    )
    assert row.decoder_ids.tolist() == [START, 9, START, 10, 11]
    assert row.labels.tolist() == [9, EOS, 10, 11, EOS]
    assert row.lengths.tolist() == [2, 3]
    assert row.encoder_ids is not None
    assert row.encoder_ids.tolist() == [5, 6, 7, EOS, 8, EOS]
    assert row.encoder_lengths is not None
    assert row.encoder_lengths.tolist() == [4, 2]


def test_an_empty_pair_row_holds_no_document() -> None:
    none = np.array([], dtype=np.int64)
    row = seq2seq_row(np.full(4, PAD, dtype=np.uint16), none, np.full(4, PAD, dtype=np.uint16), none, START)
    assert row.decoder_ids.size == row.labels.size == row.lengths.size == 0


def test_padding_is_one_document_behind_all_rows_and_has_no_targets() -> None:
    full = causal_lm_row(np.arange(10, 19, dtype=np.uint16), np.array([5]), 8)
    part = causal_lm_row(np.array([30, 31, EOS, PAD, PAD, PAD, PAD, PAD, PAD]), np.array([3]), 3)
    batch = make_batch([part, full], LM, BYTE_LENGTHS, index=3, key=9)
    assert batch.decoder_ids.tolist() == [30, 31, EOS, *range(10, 18), *[PAD] * 5]
    assert batch.decoder_info.lengths == (3, 5, 3, 5)
    assert batch.labels.tolist() == [31, EOS, -100, 11, 12, 13, 14, -100, 16, 17, 18, *[-100] * 5]
    assert batch.target_tokens == 9
    assert batch.target_bytes == sum(int(BYTE_LENGTHS[t]) for t in (31, EOS, 11, 12, 13, 14, 16, 17, 18))
    assert (batch.index, batch.dropout_key) == (3, 9)


def test_pairs_have_equally_many_documents_on_both_sides_padding_included() -> None:
    shape = BatchShape(rows=2, sequence_length=6, source_length=8, pad_id=PAD, start_id=START)
    row = seq2seq_row(
        np.array([5, EOS, 8, 8, EOS, PAD, PAD, PAD]),
        np.array([2, 5]),
        np.array([9, EOS, 7, PAD, PAD, PAD]),
        np.array([2, 3]),
        START,
    )
    for rows in ([row, row], [row], [None, row], []):
        batch = make_batch(rows, shape, BYTE_LENGTHS, index=0, key=0)
        assert batch.encoder_info is not None
        assert batch.encoder_ids is not None
        assert len(batch.encoder_info.lengths) == len(batch.decoder_info.lengths)
        assert sum(batch.encoder_info.lengths) == batch.encoder_ids.numel() == 16
        assert sum(batch.decoder_info.lengths) == batch.decoder_ids.numel() == 12
        assert batch.target_tokens == 3 * sum(r is not None for r in rows)


@pytest.mark.parametrize("source_length", [None, 5])
def test_an_empty_micro_batch_is_one_padding_document_on_each_side(source_length: int | None) -> None:
    shape = BatchShape(rows=2, sequence_length=8, source_length=source_length, pad_id=PAD, start_id=START)
    batch = empty_batch(shape)
    full = make_batch([], shape, BYTE_LENGTHS, index=0, key=0)
    assert batch.index == -1
    assert batch.digest == batch.target_tokens == batch.target_bytes == 0
    assert (batch.labels == IGNORED_LABEL).all()
    assert batch.decoder_info.lengths == (16,)
    assert batch.decoder_ids.shape == full.decoder_ids.shape
    assert (batch.encoder_info is None) == (source_length is None)
    if batch.encoder_info is not None:
        assert batch.encoder_info.lengths == (10,)


def test_the_layout_equals_the_one_that_torch_derives() -> None:
    lengths = [3, 1, 7, 5]
    ours, theirs = seq_info(np.array(lengths)), SeqInfo.from_lengths(lengths)
    assert ours.lengths == theirs.lengths
    for a, b in ((ours.cu_seqlens, theirs.cu_seqlens), (ours.positions, theirs.positions)):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_the_digest_tells_ids_labels_layout_and_number_apart() -> None:
    def digest(ids: list[int], ends: list[int], index: int = 0) -> int:
        row = causal_lm_row(np.array(ids), np.array(ends, dtype=np.int64), 8)
        return make_batch([row], LM, BYTE_LENGTHS, index=index, key=0).digest

    ids = list(range(10, 19))
    digests = {digest(ids, [5]), digest(ids, [4]), digest(ids, []), digest(ids, [5], 1), digest([*ids[:8], 99], [5]),
               digest([99, *ids[1:]], [5])}  # fmt: skip
    assert len(digests) == 6
    assert all(0 <= d < 1 << 62 for d in digests)
    assert digest([11, 10, *ids[2:]], [5]) not in digests
    assert digest(ids, [5]) == 1630512732453171393  # never changes: runs are compared by it
    assert 0 <= sum_digests(digests) < 1 << 48
    parts = sorted(digests)
    assert sum_digests([sum_digests(parts[:2]), sum_digests(parts[2:])]) == sum_digests(digests)


def test_dropout_keys_differ_by_seed_step_and_number() -> None:
    keys = {dropout_key(seed, step, j) for seed in range(3) for step in range(20) for j in range(20)}
    assert len(keys) == 1200
    assert all(0 <= key < 1 << 63 for key in keys)


def test_a_masked_row_leaves_the_others_as_they_are() -> None:
    row = causal_lm_row(np.arange(10, 19), np.array([8]), 8)
    batch = make_batch([None, row], LM, BYTE_LENGTHS, index=0, key=0)
    assert batch.decoder_ids.tolist() == [*range(10, 18), *[PAD] * 8]
    assert batch.target_tokens == 7
    assert isinstance(row, PackedRow)
