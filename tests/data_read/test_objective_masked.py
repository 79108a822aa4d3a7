"""Masked language modelling against its definition, counted over many tokens."""

from __future__ import annotations

import numpy as np
import pytest

from pretrain.data.objective_masked import MaskRule, masked_lm_row
from pretrain.data.random_stream import row_key, uniforms, validation_key
from pretrain.sequence import IGNORED_LABEL

EOS, PAD, START, MASK = 0, 1, 2, 300
RULE = MaskRule.of(0.15, MASK, num_ids=300, control_ids=(EOS, PAD, START))


def text(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 300, count).astype(np.uint16)


def splitmix64(state: int, count: int) -> list[int]:
    """Steele, Lea and Flood 2014, in plain integers."""
    out, mask = [], 2**64 - 1
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        out.append(z ^ (z >> 31))
    return out


def test_fifteen_percent_are_guessed_of_which_eighty_are_masked_ten_replaced_and_ten_stay() -> None:
    ids = text(200_000)
    row = masked_lm_row(ids, np.array([], dtype=np.int64), ids.size, RULE, key=5)
    chosen = row.labels != IGNORED_LABEL
    assert chosen.mean() == pytest.approx(0.15, abs=0.004)
    assert (row.labels[chosen] == ids[chosen]).all()
    assert (row.decoder_ids[~chosen] == ids[~chosen]).all()
    seen = row.decoder_ids[chosen]
    assert (seen == MASK).mean() == pytest.approx(0.8, abs=0.01)
    kept = (seen == ids[chosen]).mean()  # 10 %, and one in 297 of the replaced by chance
    assert kept == pytest.approx(0.1 + 0.1 / 297, abs=0.007)
    replaced = seen[(seen != MASK) & (seen != ids[chosen])]
    counts = np.bincount(replaced, minlength=301)
    assert counts[[EOS, PAD, START, MASK]].sum() == 0
    assert counts[3:300].min() > 0  # about 10 each
    assert counts.max() < 40


def test_ends_of_documents_and_padding_are_never_masked() -> None:
    ids = np.array([10, 11, EOS, 12, EOS, PAD, PAD, PAD, PAD])
    everything = MaskRule.of(0.999999, MASK, num_ids=300, control_ids=(EOS, PAD, START))
    row = masked_lm_row(ids, np.array([3, 5]), 5, everything, key=1)
    assert row.labels.tolist() == [10, 11, IGNORED_LABEL, 12, IGNORED_LABEL]
    assert row.decoder_ids[[2, 4]].tolist() == [EOS, EOS]
    assert row.lengths.tolist() == [3, 2]
    assert row.encoder_ids is None


def test_a_document_that_the_edge_cuts_is_one_of_the_row() -> None:
    row = masked_lm_row(text(9), np.array([3]), 8, RULE, key=1)
    assert row.lengths.tolist() == [3, 5]
    assert row.decoder_ids.size == row.labels.size == 8


def test_a_row_of_padding_holds_nothing() -> None:
    row = masked_lm_row(np.full(9, PAD), np.array([], dtype=np.int64), 0, RULE, key=1)
    assert row.decoder_ids.size == row.labels.size == row.lengths.size == 0


def test_equal_keys_give_equal_rows_and_others_do_not() -> None:
    ids, ends = text(64), np.array([20])
    one, same, other = (masked_lm_row(ids, ends, 64, RULE, key) for key in (3, 3, 4))
    assert one.decoder_ids.tolist() == same.decoder_ids.tolist()
    assert one.labels.tolist() == same.labels.tolist() != other.labels.tolist()


def test_the_mask_may_be_an_id_of_the_tokenizer_and_is_then_no_text() -> None:
    rule = MaskRule.of(0.5, 7, num_ids=300, control_ids=(EOS, PAD, START))
    row = masked_lm_row(np.full(1000, 7), np.array([], dtype=np.int64), 1000, rule, key=1)
    assert (row.labels == IGNORED_LABEL).all()
    assert 7 not in rule.text_ids


def test_the_stream_never_changes_and_is_uniform() -> None:
    assert uniforms(1, 50).tolist() == [(word >> 11) / 2**53 for word in splitmix64(1, 50)]
    assert splitmix64(1, 1) == [0x910A2DEC89025CC1]  # as published
    values = uniforms(99, 100_000)
    assert 0 <= values.min() < values.max() < 1
    counts = np.bincount((values * 64).astype(int), minlength=64)
    expected = 100_000 / 64
    assert ((counts - expected) ** 2 / expected).sum() < 110  # chi squared of 63 degrees: 0.9998 lie below
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.01


def test_keys_differ_by_seed_step_number_and_row() -> None:
    keys = {row_key(a, b, c, d) for a in range(4) for b in range(6) for c in range(6) for d in range(6)}
    keys |= {validation_key(row) for row in range(100)}
    assert len(keys) == 4 * 6 * 6 * 6 + 100
