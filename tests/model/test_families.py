"""What every family promises, whatever it computes: a new one is a line in `small.FAMILIES`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pretrain.config.schema import AnyModelConfig, LossConfig
from pretrain.errors import UserError
from pretrain.model.registry import build_model
from pretrain.sequence import Batch
from tests.model.small import FAMILIES, VOCABULARY, batch_for, documents_of, empty_batch_for, make_batch, random_ids

every_family = pytest.mark.parametrize("family", FAMILIES)
every_writer = pytest.mark.parametrize(
    "family", [name for name, config in FAMILIES.items() if config().layout != "encoder"]
)


def build(config: AnyModelConfig, *, activation_checkpointing: bool = False) -> nn.Module:
    return build_model(config, LossConfig(chunk_rows=7), seed=3, activation_checkpointing=activation_checkpointing)


def gradients(model: nn.Module, *batches: Batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for batch in batches:
        model(batch).objective.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@every_family
@pytest.mark.parametrize("attention", ["auto", "qblock", "sdpa", "reference"])
def test_packed_gradients_equal_those_of_the_documents_alone(family: str, attention: str) -> None:
    config = FAMILIES[family](attention=attention)
    model, batch = build(config), batch_for(config)
    if attention == "sdpa" and getattr(config, "attention_softcap", None):
        with pytest.raises(UserError, match="no SDPA kernel caps scores"):
            model(batch)
        return
    packed, alone = gradients(model, batch), gradients(model, *documents_of(batch))
    for name, gradient in packed.items():
        bound = 1e-5 * max(1.0, float(alone[name].abs().max()))
        assert torch.allclose(gradient, alone[name], atol=bound, rtol=1e-4), name


@every_family
def test_every_parameter_has_a_gradient(family: str) -> None:
    config = FAMILIES[family]()
    for name, gradient in gradients(build(config), batch_for(config)).items():
        assert gradient.abs().sum() > 0, name


@every_family
def test_the_gradient_is_the_slope_of_the_loss(family: str) -> None:
    config = FAMILIES[family](attention="reference")
    model, batch = build(config).double(), batch_for(config)
    found = gradients(model, batch)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in list(model.named_parameters())[:: max(1, len(found) // 8)]:
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * 1e-4 * direction)
                losses.append(model(batch).objective.item())
                parameter.sub_(sign * 1e-4 * direction)
        slope = (losses[0] - losses[1]) / 2e-4
        assert float((found[name] * direction).sum()) == pytest.approx(slope, rel=5e-3, abs=1e-3), name


@every_family
def test_changing_one_document_leaves_the_logits_of_the_others_unchanged(family: str) -> None:
    config = FAMILIES[family]()
    model, batch = build(config).eval(), batch_for(config)
    first = batch.decoder_info.lengths[0]
    ids = batch.decoder_ids.clone()
    ids[:first] = (ids[:first] + 1) % VOCABULARY
    source = None if batch.encoder_ids is None else (batch.encoder_ids, batch.encoder_info.lengths)
    with torch.no_grad():
        before = model.logits(batch)
        after = model.logits(make_batch(ids, batch.decoder_info.lengths, batch.labels, source))
    assert torch.equal(before[first:], after[first:])
    assert not torch.equal(before[:first], after[:first])


@every_family
def test_an_empty_micro_batch_gives_zero_loss_and_zero_gradients(family: str) -> None:
    config = FAMILIES[family](dropout=0.1)
    model = build(config)
    sums = model(empty_batch_for(config))
    assert [value.item() for value in sums] == [0.0, 0.0, 0.0]
    sums.objective.backward()
    assert all(parameter.grad is None or parameter.grad.abs().sum() == 0 for parameter in model.parameters())


@every_family
def test_recomputed_layers_give_the_same_bits_with_dropout(family: str) -> None:
    config = FAMILIES[family](dropout=0.3)
    batch = batch_for(config)
    plain, replayed = gradients(build(config), batch), gradients(build(config, activation_checkpointing=True), batch)
    assert all(torch.equal(plain[name], replayed[name]) for name in plain)


@every_family
def test_a_bf16_model_stays_close_to_fp32(family: str) -> None:
    config = FAMILIES[family]()
    rounded = build(config).eval().bfloat16()
    exact = copy.deepcopy(rounded).float()
    batch = batch_for(config)
    with torch.no_grad():
        found, right = rounded.logits(batch), exact.logits(batch)
    assert found.dtype == torch.float32
    assert ((found - right).norm() / right.norm()).item() < 0.03


@every_writer
def test_decoding_with_a_cache_equals_the_full_pass(family: str) -> None:
    config = FAMILIES[family]()
    model = build(config).eval()
    ids, source = random_ids(12), random_ids(9, 1)
    pairs = config.layout == "encoder_decoder"
    with torch.no_grad():
        full = model.logits(make_batch(ids, [12], ids, (source, [9]) if pairs else None))
        cache = model.new_cache(12, model.encode(source)) if pairs else model.new_cache(12)
        for start, end in ((0, 5), (5, 6), (6, 12)):
            torch.testing.assert_close(model.decode(ids[start:end], cache)[0], full[end - 1], atol=1e-5, rtol=1e-5)


@every_family
def test_a_tied_output_matrix_is_the_embedding_and_an_untied_one_is_not(family: str) -> None:
    tied, untied = (build(FAMILIES[family](tied_embeddings=value)) for value in (True, False))
    names = [dict(model.named_parameters()).keys() for model in (tied, untied)]
    assert names[1] - names[0] == {"head.weight"}
    assert not names[0] - names[1]
