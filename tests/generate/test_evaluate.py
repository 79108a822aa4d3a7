"""Losses from sums: the same for every split over batches and ranks (T23)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pretrain.config.schema import DecoderConfig, LossConfig
from pretrain.generate.evaluate import LossTotals, total
from pretrain.metrics.definitions import unknown_fields
from pretrain.model.registry import build_model
from pretrain.sequence import IGNORED_LABEL, Batch, SeqInfo


def test_loss_perplexity_and_bits_per_byte_by_hand() -> None:
    totals = LossTotals(nats=6 * math.log(8), target_tokens=6, target_bytes=9)
    assert totals.loss == pytest.approx(math.log(8))
    assert totals.perplexity == pytest.approx(8)
    assert totals.bits_per_byte == pytest.approx(6 * 3 / 9)  # log2(8) = 3 bits for each of 6 tokens, 9 bytes


def test_nothing_measured_is_nan_and_not_a_perfect_zero() -> None:
    assert math.isnan(LossTotals().loss)
    assert math.isnan(LossTotals().bits_per_byte)
    assert LossTotals(5000.0, 1, 1).perplexity == math.inf


def test_a_validation_record_has_only_fields_of_the_ledger() -> None:
    assert unknown_fields({"step": 1, "validation": {"prose": LossTotals(1.0, 2, 3).to_record()}}) == []


def _batch(documents: list[list[int]], padding: int) -> Batch:
    ids = [token for document in documents for token in document] + [0] * padding
    labels = [label for d in documents for label in [*d[1:], IGNORED_LABEL]] + [IGNORED_LABEL] * padding
    targets = sum(len(d) - 1 for d in documents)
    lengths = [len(d) for d in documents] + ([padding] if padding else [])
    return Batch(
        index=0,
        decoder_ids=torch.tensor(ids),
        decoder_info=SeqInfo.from_lengths(lengths),
        labels=torch.tensor(labels),
        encoder_ids=None,
        encoder_info=None,
        dropout_key=1,
        target_tokens=targets,
        target_bytes=3 * targets,
        digest=0,
    )


@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("padding", [0, 7])
def test_validation_loss_does_not_depend_on_batch_size_ranks_or_padding(
    batch_size: int, ranks: int, padding: int
) -> None:
    config = DecoderConfig(vocabulary_size=40, width=16, num_heads=2, feed_forward_width=32, num_layers=1)
    model = build_model(config, LossConfig(), seed=3, activation_checkpointing=False).double().eval()
    draw = np.random.default_rng(0)
    documents = [draw.integers(0, 40, size=n).tolist() for n in (3, 30, 11, 5, 17)]
    batches = [_batch(documents[i : i + batch_size], padding) for i in range(0, 5, batch_size)]
    parts = [LossTotals() for _ in range(ranks)]
    with torch.no_grad():
        for j, batch in enumerate(batches):
            nats = float(model(batch).nll)
            parts[j % ranks] += LossTotals(nats, batch.target_tokens, batch.target_bytes)
        # The reference knows no batches: each document alone, each target's log-probability on its own.
        nats, count = 0.0, 0
        for document in documents:
            logits = model.logits(_batch([document], 0))
            for place in range(len(document) - 1):
                nats -= float(torch.log_softmax(logits[place], -1)[document[place + 1]])
                count += 1
    got = total(parts)
    assert got.target_tokens == count == 61
    assert got.loss == pytest.approx(nats / count, rel=1e-6)
    assert got.bits_per_byte == pytest.approx(nats / math.log(2) / (3 * count), rel=1e-6)
