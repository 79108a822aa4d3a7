"""The encoder-decoder against torch.nn's Transformer layers, and on packed pairs."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from pretrain.config.schema import LossConfig
from pretrain.model.positions import sinusoids
from pretrain.model.registry import build_model
from pretrain.sequence import IGNORED_LABEL, Batch
from tests.model.small import encoder_decoder_config, lm_batch, make_batch, pair_batch, random_ids

SOURCE, TARGET = (7, 3, 11), (4, 9, 2)


def build(activation_checkpointing: bool = False, loss: LossConfig | None = None, **changes: object) -> nn.Module:
    return build_model(
        encoder_decoder_config(**changes),
        loss or LossConfig(chunk_rows=6),
        seed=2,
        activation_checkpointing=activation_checkpointing,
    )


def gradients(model: nn.Module, *batches: Batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for batch in batches:
        model(batch).objective.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def pairs(batch: Batch) -> list[Batch]:
    target, source = batch.decoder_info.lengths, batch.encoder_info.lengths
    pieces = zip(
        batch.decoder_ids.split(target), batch.labels.split(target), batch.encoder_ids.split(source), strict=True
    )
    return [make_batch(ids, [len(ids)], labels, (src, [len(src)])) for ids, labels, src in pieces]


def paper_positions(count: int, width: int) -> torch.Tensor:
    table = torch.zeros(count, width, dtype=torch.float64)
    for position in range(count):
        for i in range(width // 2):
            angle = position / 10000 ** (2 * i / width)
            table[position, 2 * i], table[position, 2 * i + 1] = math.sin(angle), math.cos(angle)
    return table


def test_sinusoids_are_those_of_the_paper() -> None:
    torch.testing.assert_close(sinusoids(torch.arange(300), 32).double(), paper_positions(300, 32), atol=2e-5, rtol=0)


def copy_linear(target: nn.Linear, source: nn.Module) -> None:
    target.weight.copy_(source.weight)
    target.bias.copy_(source.bias)


def copy_attention(target: nn.MultiheadAttention, source: nn.Module) -> None:
    if hasattr(source, "qkv"):
        weight, bias = source.qkv.weight, source.qkv.bias
    else:
        weight = torch.cat((source.query.weight, source.key_value.weight))
        bias = torch.cat((source.query.bias, source.key_value.bias))
    target.in_proj_weight.copy_(weight)
    target.in_proj_bias.copy_(bias)
    copy_linear(target.out_proj, source.output)


@torch.no_grad()
def torch_twin(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """torch.nn's post-norm layers with the weights of `model`."""
    config = model.config
    options = {"dropout": 0.0, "layer_norm_eps": config.norm_eps, "batch_first": True, "norm_first": False}
    shape = (config.width, config.num_heads, config.feed_forward_width)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(*shape, **options), config.num_encoder_layers, enable_nested_tensor=False
    )
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(*shape, **options), config.num_decoder_layers)
    for theirs, ours in [
        *zip(encoder.layers, model.encoder.layers, strict=True),
        *zip(decoder.layers, model.layers, strict=True),
    ]:
        copy_attention(theirs.self_attn, ours.attention)
        copy_linear(theirs.linear1, ours.mlp.inner)
        copy_linear(theirs.linear2, ours.mlp.outer)
        norms = [ours.attention_norm, ours.mlp_norm]
        if hasattr(ours, "cross"):
            copy_attention(theirs.multihead_attn, ours.cross)
            norms.insert(1, ours.cross_norm)
        for number, norm in enumerate(norms, start=1):
            copy_linear(getattr(theirs, f"norm{number}"), norm)
    return encoder.train(), decoder.train()  # train mode: no inference fast path


def randomise(model: nn.Module) -> None:
    """Biases and norms away from 0 and 1, so that a swap of two of them would show."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_gradients_equal_the_layers_of_torch(tied: bool) -> None:
    model = build(tied_embeddings=tied)
    randomise(model)
    batch = pair_batch([9], [6])
    encoder, decoder = torch_twin(model)
    table = model.embedding.table.weight.detach().clone().requires_grad_()
    output = table if tied else model.head.weight.detach().clone().requires_grad_()

    def embed(ids: torch.Tensor) -> torch.Tensor:
        return (table[ids] * math.sqrt(32) + paper_positions(len(ids), 32).float())[None]

    mask = torch.triu(torch.ones(6, 6, dtype=torch.bool), diagonal=1)
    hidden = decoder(embed(batch.decoder_ids), encoder(embed(batch.encoder_ids)), tgt_mask=mask)[0]
    logits = hidden @ output.T
    loss = nn.functional.cross_entropy(logits, batch.labels, reduction="sum")
    loss.backward()
    torch.testing.assert_close(model.logits(batch), logits, atol=1e-4, rtol=1e-4)
    found = gradients(model, batch)
    torch.testing.assert_close(found["embedding.table.weight"], table.grad, atol=1e-4, rtol=1e-4)
    inner = decoder.layers[0].multihead_attn.in_proj_weight.grad
    torch.testing.assert_close(found["layers.0.cross.key_value.weight"], inner[32:], atol=1e-4, rtol=1e-4)
    first = encoder.layers[0].linear1.weight.grad
    torch.testing.assert_close(found["encoder.layers.0.mlp.inner.weight"], first, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("attention", ["split", "sdpa", "reference"])
def test_packed_gradients_equal_those_of_the_pairs_alone(attention: str) -> None:
    model = build(attention=attention)
    batch = pair_batch(SOURCE, TARGET)
    packed, alone = gradients(model, batch), gradients(model, *pairs(batch))
    for name in packed:
        assert torch.allclose(packed[name], alone[name], atol=2e-5, rtol=1e-4), name


def test_the_encoder_looks_both_ways_and_the_decoder_only_back() -> None:
    model = build().eval()
    batch = pair_batch([8], [6])
    source = batch.encoder_ids.clone()
    source[-1] = (source[-1] + 1) % 101
    target = batch.decoder_ids.clone()
    target[-1] = (target[-1] + 1) % 101
    with torch.no_grad():
        assert not torch.allclose(model.encode(batch.encoder_ids)[0], model.encode(source)[0])
        before = model.logits(batch)
        other_source = model.logits(make_batch(batch.decoder_ids, [6], batch.labels, (source, [8])))
        other_target = model.logits(make_batch(target, [6], batch.labels, (batch.encoder_ids, [8])))
    assert not torch.allclose(before[0], other_source[0])
    assert torch.equal(before[:5], other_target[:5])
    assert not torch.equal(before[5], other_target[5])


def test_a_target_sees_its_own_source_only() -> None:
    model = build().eval()
    batch = pair_batch(SOURCE, TARGET)
    source = batch.encoder_ids.clone()
    source[:7] = (source[:7] + 1) % 101
    with torch.no_grad():
        before = model.logits(batch)
        after = model.logits(make_batch(batch.decoder_ids, TARGET, batch.labels, (source, SOURCE)))
    assert torch.equal(before[4:], after[4:])
    assert not torch.equal(before[:4], after[:4])


def test_an_empty_micro_batch_gives_zero_loss_and_zero_gradients() -> None:
    model = build(dropout=0.1, loss=LossConfig(label_smoothing=0.1, z_loss=1e-3, chunk_rows=6))
    padding = torch.ones(16, dtype=torch.int64)
    sums = model(make_batch(padding, [16], torch.full((16,), IGNORED_LABEL), (padding, [16])))
    assert [value.item() for value in sums] == [0.0, 0.0, 0.0]
    sums.objective.backward()
    assert all(parameter.grad.abs().sum() == 0 for parameter in model.parameters())


def test_recomputed_layers_give_the_same_bits_with_dropout() -> None:
    batch = pair_batch(SOURCE, TARGET)
    plain = gradients(build(dropout=0.3), batch)
    replayed = gradients(build(dropout=0.3, activation_checkpointing=True), batch)
    assert all(torch.equal(plain[name], replayed[name]) for name in plain)


def test_decoding_with_a_cache_equals_the_full_pass() -> None:
    model = build().eval()
    source, target = random_ids(9, 1), random_ids(7, 2)
    with torch.no_grad():
        full = model.logits(make_batch(target, [7], target, (source, [9])))
        cache = model.new_cache(7, model.encode(source))
        for start, end in ((0, 3), (3, 4), (4, 7)):
            logits = model.decode(target[start:end], cache)[0]
            torch.testing.assert_close(logits, full[end - 1], atol=1e-5, rtol=1e-5)


def test_a_bf16_model_stays_close_to_fp32_at_far_positions() -> None:
    rounded = build().eval().bfloat16()
    exact = copy.deepcopy(rounded).float()
    ids = random_ids(600)
    with torch.no_grad():
        found, right = (model.embedding(ids, pair_batch([600], [1]).encoder_info) for model in (rounded, exact))
    error = (found.float() - right).norm(dim=1) / right.norm(dim=1)
    assert error[-100:].max() < 4e-3


def test_a_batch_without_a_source_is_refused() -> None:
    with pytest.raises(ValueError, match="encoder_ids"):
        build()(lm_batch([8]))
