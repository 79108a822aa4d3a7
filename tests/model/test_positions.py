"""Positions against the code of `transformers`, the papers' formulas and hand counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from pretrain.config import config_from_dict
from pretrain.config.schema import LinearRope, Llama3Rope, LossConfig, NtkRope, RopeScaling, YarnRope
from pretrain.errors import UserError
from pretrain.model.attention import attend
from pretrain.model.positions import (
    LearnedPositions,
    RelativePositionBias,
    alibi_bias,
    alibi_slopes,
    relative_buckets,
    rotary_angles,
    rotary_frequencies,
    rotate,
    sinusoids,
)
from pretrain.model.positions.exchange import from_hf_rope, to_hf_rope
from pretrain.model.registry import build_model
from pretrain.sequence import SeqInfo
from tests.config.base import changed, problems_of
from tests.model.small import decoder_config, encoder_decoder_config, lm_batch

CPU = torch.device("cpu")
SCALINGS: dict[str, tuple[RopeScaling, dict[str, Any]]] = {
    "linear": (LinearRope(factor=4.0), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        Llama3Rope(factor=8.0, original_sequence_length=512),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 512,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
    "yarn": (
        YarnRope(factor=4.0, original_sequence_length=512),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    ),
    "yarn with its options": (
        YarnRope(factor=2.5, original_sequence_length=300, beta_fast=20.0, beta_slow=2.0, attention_factor=1.25),
        {
            "rope_type": "yarn",
            "factor": 2.5,
            "original_max_position_embeddings": 300,
            "beta_fast": 20.0,
            "beta_slow": 2.0,
            "attention_factor": 1.25,
        },
    ),
}


def theirs(parameters: dict[str, Any], theta: float, head_width: int, **more: Any) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=4 * head_width,
        num_attention_heads=4,
        head_dim=head_width,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": theta, **parameters},
    )
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, CPU, **more)


@pytest.mark.parametrize("head_width", [32, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_are_those_of_transformers(name: str, theta: float, head_width: int) -> None:
    ours, parameters = SCALINGS[name]
    found, factor = rotary_frequencies(head_width, theta, ours, CPU)
    right, right_factor = theirs(parameters, theta, head_width)
    torch.testing.assert_close(found, right, rtol=2e-7, atol=0)
    assert factor == right_factor
    plain, _ = rotary_frequencies(head_width, theta, None, CPU)
    assert (found / plain).min() == pytest.approx(1 / ours.factor)  # the lowest frequency is divided


def test_ntk_is_the_dynamic_scaling_of_transformers_held_at_one_length() -> None:
    found, factor = rotary_frequencies(64, 10000.0, NtkRope(factor=3.0), CPU)
    right, _ = theirs({"rope_type": "dynamic", "factor": 1.0}, 10000.0, 64, seq_len=3 * 2048)
    torch.testing.assert_close(found, right, rtol=2e-7, atol=0)
    plain, _ = rotary_frequencies(64, 10000.0, None, CPU)
    assert factor == 1.0
    assert found[0] == plain[0]
    assert (plain[-1] / found[-1]).item() == pytest.approx(3.0)


def test_the_attention_factor_scales_queries_and_keys_and_its_gradient_checks() -> None:
    positions = torch.tensor([0, 1, 5])
    scaling = YarnRope(factor=4.0, original_sequence_length=16)
    rotary = rotary_angles(positions, 8, 100.0, torch.float64, scaling)
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    ratio = rotate(x, rotary).norm(dim=-1) / x.norm(dim=-1)
    torch.testing.assert_close(ratio, torch.full_like(ratio, 0.1 * math.log(4) + 1), rtol=1e-6, atol=0)
    assert torch.autograd.gradcheck(lambda x: rotate(x, rotary), (x,))


@pytest.mark.parametrize("scaling", [None, *(ours for ours, _ in SCALINGS.values())], ids=str)
def test_rope_scaling_goes_to_hugging_face_and_back(scaling: RopeScaling | None) -> None:
    assert from_hf_rope(to_hf_rope(10000.0, scaling, 32)) == scaling


def test_ntk_is_exported_as_a_larger_base_with_the_same_frequencies() -> None:
    body = to_hf_rope(10000.0, NtkRope(factor=2.0), 32)
    assert body["rope_type"] == "default"
    found, _ = rotary_frequencies(32, body["rope_theta"], None, CPU)
    assert torch.equal(found, rotary_frequencies(32, 10000.0, NtkRope(factor=2.0), CPU)[0])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "mscale": 0.7},
        {"rope_type": "yarn", "factor": 2.0},
    ],
    ids=str,
)
def test_a_scaling_that_we_do_not_compute_is_refused(rope: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="cannot be imported"):
        from_hf_rope(rope)


def test_sinusoids_are_the_papers() -> None:
    table = sinusoids(torch.tensor([0, 3, 1000]), 6)
    for row, position in enumerate((0, 3, 1000)):
        for i in range(3):
            angle = position / 10000 ** (2 * i / 6)
            assert table[row, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-4)
            assert table[row, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-4)


def test_learned_positions_restart_with_every_document_and_are_trained() -> None:
    table = LearnedPositions(8, 4)
    torch.nn.init.normal_(table.weight, generator=torch.Generator().manual_seed(0))
    out = table(SeqInfo.from_lengths([3, 2]).positions)
    assert torch.equal(out[3:], table.weight[:2])
    out.sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad[:, 0].tolist() == [2, 2, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("bidirectional", [True, False], ids=["encoder", "decoder"])
@pytest.mark.parametrize("length", [1, 10, 200])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20)])
def test_t5_buckets_are_those_of_transformers(
    length: int, bidirectional: bool, num_buckets: int, max_distance: int
) -> None:
    places = torch.arange(length)
    relative = (places[None, :] - places[:, None]).flatten()
    right = T5Attention._relative_position_bucket(relative, bidirectional, num_buckets, max_distance)
    found = relative_buckets(relative, num_buckets=num_buckets, max_distance=max_distance, bidirectional=bidirectional)
    assert torch.equal(found, right)
    if not bidirectional:
        assert found[relative > 0].eq(0).all()


@pytest.mark.parametrize("num_heads", [1, 2, 6, 8, 12, 16])
def test_alibi_slopes_are_those_of_bloom(num_heads: int) -> None:
    right = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(alibi_slopes(num_heads)), right)


def test_alibi_in_attention_is_a_penalty_by_distance() -> None:
    q, k, v = (torch.randn(7, 4, 8, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(3))
    out = attend(q, k, v, q_info=SeqInfo.from_lengths([3, 4]), causal=True, scale=0.3, bias=alibi_bias(4))
    for start, stop in ((0, 3), (3, 7)):
        for i in range(start, stop):
            for head in range(4):
                keys = range(start, i + 1)
                scores = [0.3 * q[i, head] @ k[j, head] - alibi_slopes(4)[head] * (i - j) for j in keys]
                weights = torch.softmax(torch.stack(scores), 0)
                right = sum(weight * v[j, head] for weight, j in zip(weights, keys, strict=True))
                torch.testing.assert_close(out[i, head], right, rtol=1e-6, atol=1e-7)


def test_the_diagonals_of_a_t5_bias_are_its_matrix() -> None:
    module = RelativePositionBias(2, num_buckets=8, max_distance=20, bidirectional=True)
    torch.nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(0))
    bias = module.rule(5, CPU)
    relative = torch.arange(5)[None, :] - torch.arange(3)[:, None]
    diagonals = bias.diagonals(5, CPU)
    matrix = bias(relative)
    for i in range(3):
        for j in range(5):
            assert torch.equal(matrix[:, i, j], diagonals[:, j - i + 4])
            bucket = T5Attention._relative_position_bucket(torch.tensor(j - i), True, 8, 20)
            assert torch.equal(matrix[:, i, j], module.weight[bucket])


def test_a_rope_scaling_is_read_checked_and_refused_where_a_family_has_none() -> None:
    scaled = {"kind": "llama3", "factor": 8, "original_sequence_length": 8192}
    assert config_from_dict(changed("model.rope_scaling", scaled)).model.rope_scaling == Llama3Rope(
        factor=8.0, original_sequence_length=8192
    )
    crossed = {**scaled, "low_freq_factor": 4}
    (problem,) = problems_of(changed("model.rope_scaling", crossed))
    assert problem.startswith("model.rope_scaling.low_freq_factor=4 is not below model.rope_scaling.high_freq_factor=4")
    assert "model.rope_scaling" in problems_of(changed("model.rope_scaling", {**scaled, "kind": "longrope"}))[0]
    with pytest.raises(ValueError, match="rope_scaling"):
        encoder_decoder_config(rope_scaling=scaled)


def test_the_decoder_turns_by_the_scaled_angles() -> None:
    batch = lm_batch([9, 4])
    plain, scaled = (
        build_model(decoder_config(rope_scaling=scaling), LossConfig(), seed=0).logits(batch)
        for scaling in (None, LinearRope(factor=4.0))
    )
    assert torch.equal(plain[[0, 9]], scaled[[0, 9]])  # place 0 does not turn
    assert (plain[3] - scaled[3]).abs().max() > 1e-6
