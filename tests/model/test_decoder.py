"""The decoder on packed rows: isolation, gradients, dropout, recomputation, dtypes, decoding."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from pretrain.config.schema import LossConfig
from pretrain.model.registry import build_model
from pretrain.sequence import IGNORED_LABEL, Batch, SeqInfo
from tests.model.small import decoder_config, lm_batch, make_batch, random_ids

LENGTHS = (9, 1, 20, 13)


def build(activation_checkpointing: bool = False, **changes: object) -> torch.nn.Module:
    return build_model(
        decoder_config(**changes), LossConfig(chunk_rows=7), seed=1, activation_checkpointing=activation_checkpointing
    )


def gradients(model: torch.nn.Module, *batches: Batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for batch in batches:
        model(batch).objective.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def documents(batch: Batch) -> list[Batch]:
    pieces = zip(
        batch.decoder_ids.split(batch.decoder_info.lengths), batch.labels.split(batch.decoder_info.lengths), strict=True
    )
    return [make_batch(ids, [len(ids)], labels) for ids, labels in pieces]


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("attention", ["split", "sdpa", "reference"])
def test_packed_gradients_equal_those_of_the_documents_alone(attention: str, qk_norm: bool) -> None:
    model = build(attention=attention, qk_norm=qk_norm)
    batch = lm_batch(LENGTHS)
    packed, alone = gradients(model, batch), gradients(model, *documents(batch))
    for name in packed:
        assert torch.allclose(packed[name], alone[name], atol=2e-6, rtol=1e-4), name


def test_changing_one_document_leaves_the_logits_of_the_next_unchanged() -> None:
    model = build().eval()
    batch = lm_batch(LENGTHS)
    ids = batch.decoder_ids.clone()
    ids[:9] = (ids[:9] + 1) % 101
    with torch.no_grad():
        before, after = model.logits(batch), model.logits(make_batch(ids, LENGTHS, batch.labels))
    assert torch.equal(before[9:], after[9:])
    assert not torch.equal(before[:9], after[:9])


def test_a_later_token_never_changes_an_earlier_logit() -> None:
    model = build().eval()
    batch = lm_batch([20])
    ids = batch.decoder_ids.clone()
    ids[10] = (ids[10] + 1) % 101
    with torch.no_grad():
        before, after = model.logits(batch), model.logits(make_batch(ids, [20], batch.labels))
    torch.testing.assert_close(before[:10], after[:10], atol=0, rtol=0)
    assert not torch.equal(before[10], after[10])


def test_the_loss_of_a_fresh_model_is_near_log_vocabulary() -> None:
    batch = lm_batch([64])
    model = build(tied_embeddings=False)
    assert model(batch).nll.item() / batch.target_tokens == pytest.approx(math.log(101), rel=0.02)


def test_a_batch_without_targets_gives_zero_loss_and_zero_gradients() -> None:
    model = build(dropout=0.1)
    labels = torch.full((16,), IGNORED_LABEL)
    sums = model(make_batch(torch.ones(16, dtype=torch.int64), [16], labels))
    assert sums.objective.item() == 0.0
    sums.objective.backward()
    assert all(parameter.grad.abs().sum() == 0 for parameter in model.parameters())


def test_only_the_objective_carries_a_gradient() -> None:
    sums = build()(lm_batch([8]))
    assert sums.objective.requires_grad
    assert not sums.nll.requires_grad
    assert not sums.z_loss.requires_grad


def test_recomputed_layers_give_the_same_bits_with_dropout_and_leave_random_state_alone() -> None:
    batch = lm_batch(LENGTHS)
    state = torch.get_rng_state()
    plain = gradients(build(dropout=0.3), batch)
    replayed = gradients(build(dropout=0.3, activation_checkpointing=True), batch)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(plain[name], replayed[name]) for name in plain)


def test_dropout_follows_the_batch_key_and_evaluation_has_none() -> None:
    model = build(dropout=0.3)
    ids = random_ids(16)
    one, same, other = (model(make_batch(ids, [16], ids, dropout_key=key)).nll.item() for key in (5, 5, 6))
    assert one == same != other
    model.eval()
    assert model(make_batch(ids, [16], ids, dropout_key=5)).nll == model(make_batch(ids, [16], ids, dropout_key=6)).nll


def test_a_tied_output_matrix_is_the_embedding_itself_and_counts_once() -> None:
    model = build(tied_embeddings=True)
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())
    untied = build(tied_embeddings=False)
    assert untied.head.weight is not untied.embedding.weight
    assert not torch.equal(untied.head.weight, untied.embedding.weight)


def test_a_bf16_model_stays_close_to_fp32_at_far_positions() -> None:
    model = build(init_std=0.1).eval()
    ids = random_ids(700)
    batch = make_batch(ids, [700], ids)
    rounded = copy.deepcopy(model).bfloat16()
    exact_weights = copy.deepcopy(rounded).float()  # the same rounded weights, computed in fp32
    with torch.no_grad():
        found, right = rounded.logits(batch), exact_weights.logits(batch)
    assert found.dtype == torch.float32
    # bf16 positions would turn 257 into 256 and more further on: the tail would be far off.
    error = (found - right).norm(dim=1) / right.norm(dim=1)
    assert error[:100].mean() < 0.02
    assert error[-100:].mean() < 0.02


@pytest.mark.parametrize("qk_norm", [False, True])
def test_decoding_with_a_cache_equals_the_full_pass(qk_norm: bool) -> None:
    model = build(qk_norm=qk_norm).eval()
    ids = random_ids(12)
    with torch.no_grad():
        full = model.logits(make_batch(ids, [12], ids))
        cache = model.new_cache(12)
        for chunk in ((0, 5), (5, 8), (8, 9), (9, 12)):
            logits = model.decode(ids[slice(*chunk)], cache)[0]
            torch.testing.assert_close(logits, full[chunk[1] - 1], atol=1e-5, rtol=1e-5)
        with pytest.raises(ValueError, match="do not fit"):
            model.decode(ids[:1], cache)


def test_rotary_positions_restart_in_every_document() -> None:
    info = SeqInfo.from_lengths([3, 2])
    assert info.positions.tolist() == [0, 1, 2, 0, 1]
    model = build().eval()
    ids = random_ids(5).repeat(2)
    with torch.no_grad():
        logits = model.logits(make_batch(ids, [5, 5], ids))
    assert torch.equal(logits[:5], logits[5:])
