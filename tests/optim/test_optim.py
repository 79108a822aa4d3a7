"""Groups, optimizers and schedules."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from pretrain.config.schema import AdamWConfig, AnyModelConfig, LossConfig, OptimizerConfig, ScheduleConfig, SGDConfig
from pretrain.model.registry import build_model
from pretrain.optim.groups import parameter_groups
from pretrain.optim.optimizers import build_optimizer
from pretrain.optim.schedules import learning_rate_at
from tests.model.small import decoder_config, encoder_decoder_config

MODELS = [
    decoder_config(qk_norm=True),
    decoder_config(tied_embeddings=False),
    encoder_decoder_config(),
    encoder_decoder_config(tied_embeddings=False),
]
OPTIMIZERS = [AdamWConfig(learning_rate=0.1), SGDConfig(learning_rate=0.1, momentum=0.9)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda config: config.kind)
@pytest.mark.parametrize("config", MODELS, ids=lambda config: f"{config.family}-{config.tied_embeddings}")
def test_decay_shrinks_matrices_once_and_leaves_norms_and_biases(
    config: AnyModelConfig, optimizer: OptimizerConfig
) -> None:
    model = build_model(config, LossConfig(), seed=1, activation_checkpointing=False)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    build_optimizer(parameter_groups(model, 0.5), optimizer).step()
    for name, parameter in model.named_parameters():
        # AdamW decays by lr * wd; SGD adds wd * w to the gradient: the same first step.
        factor = 1.0 if "norm" in name or name.endswith("bias") else 1.0 - 0.1 * 0.5
        torch.testing.assert_close(parameter.detach(), before[name] * factor, msg=name)


@pytest.mark.parametrize("config", MODELS, ids=lambda config: f"{config.family}-{config.tied_embeddings}")
def test_every_parameter_is_in_exactly_one_named_group(config: AnyModelConfig) -> None:
    model = build_model(config, LossConfig(), seed=1, activation_checkpointing=False)
    groups = parameter_groups(model, 0.1)
    assert [(group["name"], group["weight_decay"]) for group in groups] == [("decay", 0.1), ("no_decay", 0.0)]
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())


def test_frozen_parameters_and_empty_groups_are_left_out() -> None:
    model = torch.nn.Linear(3, 3)
    model.bias.requires_grad_(False)
    assert [group["name"] for group in parameter_groups(model, 0.1)] == ["decay"]


def test_adamw_equals_the_update_rule_written_out() -> None:
    config = AdamWConfig(learning_rate=0.01, beta1=0.8, beta2=0.9, eps=1e-6)
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 3, generator=generator))
    optimizer = build_optimizer([{"name": "decay", "params": [weight], "weight_decay": 0.1}], config)
    value = weight.detach().double().clone()
    first, second = torch.zeros_like(value), torch.zeros_like(value)
    for step in range(1, 6):
        gradient = torch.randn(4, 3, generator=generator)
        weight.grad = gradient
        optimizer.step()
        value *= 1 - 0.01 * 0.1
        first = 0.8 * first + 0.2 * gradient.double()
        second = 0.9 * second + 0.1 * gradient.double() ** 2
        value -= 0.01 * (first / (1 - 0.8**step)) / ((second / (1 - 0.9**step)).sqrt() + 1e-6)
        torch.testing.assert_close(weight.detach().double(), value, atol=1e-6, rtol=1e-6)


def schedule(kind: str, **values: float) -> ScheduleConfig:
    return ScheduleConfig(**({"kind": kind, "total_steps": 100, "warmup_steps": 10} | values))


@pytest.mark.parametrize("kind", ["constant", "cosine", "wsd", "inverse_sqrt"])
def test_the_warm_up_rises_linearly_and_reaches_the_peak_at_its_last_step(kind: str) -> None:
    rates = [learning_rate_at(step, 2.0, schedule(kind)) for step in range(10)]
    assert rates == pytest.approx([0.2 * (step + 1) for step in range(10)])


def test_cosine_ends_at_the_final_fraction_and_is_half_way_in_the_middle() -> None:
    config = schedule("cosine", final_fraction=0.2)
    assert learning_rate_at(99, 1.0, config) == pytest.approx(0.2)
    assert learning_rate_at(54, 1.0, config) == pytest.approx(0.6)
    assert learning_rate_at(500, 1.0, config) == pytest.approx(0.2)
    rates = [learning_rate_at(step, 1.0, config) for step in range(9, 100)]
    assert rates == sorted(rates, reverse=True)


def test_wsd_is_flat_and_then_falls_linearly_to_the_final_fraction() -> None:
    config = schedule("wsd", decay_steps=20, final_fraction=0.0)
    assert [learning_rate_at(step, 1.0, config) for step in (10, 50, 79)] == [1.0, 1.0, 1.0]
    assert learning_rate_at(89, 1.0, config) == pytest.approx(0.5)
    assert learning_rate_at(99, 1.0, config) == pytest.approx(0.0)
    assert learning_rate_at(99, 1.0, schedule("wsd")) == 1.0  # no decay phase


def test_inverse_sqrt_is_the_rate_of_the_2017_paper() -> None:
    config = schedule("inverse_sqrt", warmup_steps=40, total_steps=1000)
    width = 512
    paper = [width**-0.5 * min(n**-0.5, n * 40**-1.5) for n in range(1, 1001)]
    found = [learning_rate_at(step, max(paper), config) for step in range(1000)]
    assert found == pytest.approx(paper)


def test_constant_stays_at_the_peak_from_the_first_step_without_warm_up() -> None:
    assert [learning_rate_at(step, 3.0, schedule("constant", warmup_steps=0)) for step in (0, 57, 200)] == [3.0] * 3


def test_a_run_of_warm_up_only_is_defined_everywhere() -> None:
    for kind in ("cosine", "wsd"):
        config = schedule(kind, total_steps=10)
        assert all(math.isfinite(learning_rate_at(step, 1.0, config)) for step in range(20))


def test_schedules_and_flops_need_no_torch() -> None:
    code = "import sys, pretrain.optim.schedules, pretrain.model.flops; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
