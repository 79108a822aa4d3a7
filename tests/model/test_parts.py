"""Initial weights, norms, gated feed-forward, rotary positions, keyed dropout, counts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pretrain.config.schema import AnyModelConfig, BatchConfig, LossConfig
from pretrain.model.dropout import keyed_dropout, mix
from pretrain.model.flops import parameter_counts, training_flops_per_row, training_flops_per_step
from pretrain.model.init import Constant, initialise
from pretrain.model.layers import RMSNorm, SwiGLU
from pretrain.model.positions import rotary_angles, rotate
from pretrain.model.registry import build_model
from tests.model.small import (
    decoder_config,
    encoder_config,
    encoder_decoder_config,
    gpt2_config,
    lm_batch,
    moe_config,
    pair_batch,
    t5_config,
    t5_v1_0_config,
)

CONFIGS = [
    decoder_config(),
    decoder_config(qk_norm=True, tied_embeddings=False, head_width=16, num_kv_heads=None),
    encoder_decoder_config(),
    encoder_decoder_config(tied_embeddings=False, num_encoder_layers=3),
    encoder_config(),
    encoder_config(tied_embeddings=False, num_layers=3),
    gpt2_config(),
    gpt2_config(tied_embeddings=False),
    t5_config(tied_embeddings=False),
    t5_v1_0_config(head_width=None, num_encoder_layers=3),
    moe_config(),
    moe_config(qk_norm=True, tied_embeddings=False, experts_per_token=3),
]


def build(config: AnyModelConfig, seed: int = 1) -> nn.Module:
    return build_model(config, LossConfig(), seed=seed, activation_checkpointing=False)


def test_initial_weights_follow_seed_and_name_not_the_other_parameters() -> None:
    small = dict(build(decoder_config()).named_parameters())
    again = dict(build(decoder_config()).named_parameters())
    untied = dict(build(decoder_config(num_heads=2, num_kv_heads=1, tied_embeddings=False)).named_parameters())
    other = dict(build(decoder_config(), seed=2).named_parameters())
    assert all(torch.equal(small[name], again[name]) for name in small)
    assert torch.equal(small["layers.1.mlp.gate_up.weight"], untied["layers.1.mlp.gate_up.weight"])
    assert not torch.equal(small["embedding.weight"], other["embedding.weight"])
    assert not torch.equal(small["layers.0.mlp.down.weight"], small["layers.1.mlp.down.weight"])


def test_building_does_not_touch_the_global_random_state() -> None:
    state = torch.get_rng_state()
    build(decoder_config())
    assert torch.equal(state, torch.get_rng_state())


def test_initial_weights_have_the_stated_spread() -> None:
    model = build(decoder_config(width=128, feed_forward_width=512, init_std=0.02))
    assert model.layers[0].mlp.gate_up.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert model.layers[0].mlp.down.weight.std().item() == pytest.approx(0.02 / 2, rel=0.03)  # / sqrt(2 * 2 layers)
    assert torch.equal(model.norm.weight, torch.ones(128))
    pair = build(encoder_decoder_config(width=128, feed_forward_width=512))
    square = pair.layers[0].cross.key_value.weight  # two 128 x 128 matrices, each with its own fans
    assert square.abs().max().item() == pytest.approx(math.sqrt(6 / 256), rel=0.01)
    assert pair.encoder.layers[0].mlp.inner.weight.abs().max().item() == pytest.approx(math.sqrt(6 / 640), rel=0.01)
    assert pair.embedding.table.weight.std().item() == pytest.approx(128**-0.5, rel=0.03)
    assert pair.layers[0].cross.query.bias.abs().sum() == 0


def test_a_parameter_without_a_rule_is_an_error() -> None:
    class Forgotten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2))
            self.other = nn.Parameter(torch.empty(2))
            self.initial = {"weight": Constant(1.0)}

    with pytest.raises(ValueError, match=r"other has no rule in Forgotten\.initial"):
        initialise(Forgotten(), 0)


@pytest.mark.parametrize("shape", [(5, 8), (5, 3, 8)], ids=str)
def test_rms_norm_and_its_gradient_equal_torchs(shape: tuple[int, ...]) -> None:
    norm = RMSNorm(8, 1e-5)
    generator = torch.Generator().manual_seed(0)
    norm.weight.data = torch.randn(8, generator=generator, dtype=torch.float64)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: nn.functional.rms_norm(x, (8,), w, 1e-5), (x, norm.weight))
    torch.testing.assert_close(norm(x), nn.functional.rms_norm(x, (8,), norm.weight, 1e-5))
    assert torch.autograd.gradcheck(norm, (x,))
    grad = torch.randn(shape, generator=generator, dtype=torch.float64)
    ours = torch.autograd.grad(norm(x), (x, norm.weight), grad)
    theirs = torch.autograd.grad(nn.functional.rms_norm(x, (8,), norm.weight, 1e-5), (x, norm.weight), grad)
    for found, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, right)


def test_rms_norm_keeps_fp32_statistics_for_bf16() -> None:
    norm = RMSNorm(4096, 1e-5)
    nn.init.ones_(norm.weight)
    norm.bfloat16()
    x = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0)).bfloat16() + 100.0
    found = norm(x).float()
    right = x.float() / x.float().square().mean(-1, keepdim=True).sqrt()
    assert (found - right).abs().max() < 8e-3  # one rounding to bf16 at 1.0, not an accumulated one


def test_swiglu_equals_its_definition_and_its_gradient_checks() -> None:
    block = SwiGLU(4, 6, Constant(0.0), Constant(0.0)).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    x = torch.randn(3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    gate, up = block.gate_up.weight.split(6)
    right = (nn.functional.silu(x @ gate.T) * (x @ up.T)) @ block.down.weight.T
    torch.testing.assert_close(block(x), right)
    assert torch.autograd.gradcheck(block, (x,))


def test_rotation_equals_complex_multiplication_and_its_gradient_checks() -> None:
    x = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    positions = torch.tensor([0, 1, 2, 0, 7])
    found = rotate(x, rotary_angles(positions, 8, 100.0, torch.float64))
    frequencies = torch.tensor([100.0 ** (-i / 4) for i in range(4)], dtype=torch.float64)
    turn = torch.exp(1j * positions[:, None] * frequencies)[:, None]
    right = torch.complex(x[..., :4], x[..., 4:]) * turn
    torch.testing.assert_close(found, torch.cat((right.real, right.imag), -1), atol=1e-6, rtol=1e-6)
    cos_sin = rotary_angles(positions, 8, 100.0, torch.float64)
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos_sin), (x,))


def test_dropout_is_a_function_of_key_and_site() -> None:
    x = torch.ones(64, 64)
    state = torch.get_rng_state()
    one = keyed_dropout(x, 0.25, key=3, site=1)
    torch.manual_seed(0)
    assert torch.equal(one, keyed_dropout(x, 0.25, key=3, site=1))
    torch.set_rng_state(state)
    assert not torch.equal(one, keyed_dropout(x, 0.25, key=4, site=1))
    assert not torch.equal(one, keyed_dropout(x, 0.25, key=3, site=2))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_keeps_the_share_and_the_mean(dtype: torch.dtype) -> None:
    x = torch.ones(1000, 1000, dtype=dtype)
    out = keyed_dropout(x, 0.1, key=1, site=0)
    kept = (out != 0).float().mean().item()
    assert kept == pytest.approx(0.9, abs=2e-3)
    assert out.max().item() == pytest.approx(1 / 0.9, rel=4e-3)
    assert keyed_dropout(x, 0.0, key=1, site=0) is x
    assert keyed_dropout(x, 1.0, key=1, site=0).abs().sum() == 0


def test_dropout_masks_do_not_depend_on_the_number_of_threads() -> None:
    before, outs = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            outs.append(keyed_dropout(torch.ones(512, 512), 0.5, key=1, site=0))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*outs)


def test_seeds_of_neighbouring_keys_and_sites_are_all_different() -> None:
    seeds = {mix(key, site) for key in range(100) for site in range(100)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.family)
def test_parameter_counts_are_those_of_the_built_model(config: AnyModelConfig) -> None:
    model = build(config)
    counts = parameter_counts(config)
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())
    assert counts.embedding == config.vocabulary_size * config.width


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.family)
def test_flops_are_those_that_torch_counts(config: AnyModelConfig) -> None:
    pairs = config.layout == "encoder_decoder"
    model = build(config.model_copy(update={"attention": "reference"}))
    batch = pair_batch([24], [16]) if pairs else lm_batch([16])
    with FlopCounterMode(display=False) as counter:  # does not know of mm(out=), so not through the fused loss
        nn.functional.cross_entropy(model.logits(batch), batch.labels).backward()
    sizes = BatchConfig(
        global_batch_size=6, micro_batch_size=1, sequence_length=16, source_length=24 if pairs else None
    )
    # The reference computes the causal half that the formula leaves out: add it back.
    head_width = getattr(config, "head_width", None) or config.width // config.num_heads
    causal_layers = {"encoder_decoder": "num_decoder_layers", "decoder": "num_layers"}.get(config.layout)
    causal_layers = getattr(config, causal_layers) if causal_layers else 0
    skipped = 3 * causal_layers * 2 * config.num_heads * head_width * 16 * 16
    assert training_flops_per_row(config, sizes) + skipped == counter.get_total_flops()
    assert training_flops_per_step(config, sizes) == 6 * training_flops_per_row(config, sizes)
