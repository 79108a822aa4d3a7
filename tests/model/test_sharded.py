"""The models with parameters that exist only while their own module runs (ZeRO-3), against a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pretrain.config.schema import LossConfig, SGDConfig
from pretrain.engine.quiet import load_deepspeed
from pretrain.model.registry import build_model
from pretrain.optim.groups import parameter_groups
from pretrain.optim.optimizers import build_optimizer
from pretrain.sequence import Batch
from pretrain.topology import World
from tests.model.small import decoder_config, encoder_decoder_config, lm_batch, pair_batch
from tests.ranks import run_ranks

CONFIGS = {
    "tied": decoder_config(qk_norm=True, dropout=0.1),
    "untied": decoder_config(tied_embeddings=False, dropout=0.1),
    "pairs": encoder_decoder_config(dropout=0.1),
}
CASES = [("tied", False, False), ("tied", True, False), ("untied", False, True), ("pairs", True, False)]
"""Model, activation checkpointing, bf16."""
STEPS = 3


def batch_for(name: str) -> Batch:
    return pair_batch((7, 3, 11), (4, 9, 2)) if name == "pairs" else lm_batch((9, 1, 20, 13))


def build(name: str, recomputed: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = build_model(CONFIGS[name], LossConfig(chunk_rows=7), seed=3, activation_checkpointing=recomputed)
    return model, build_optimizer(parameter_groups(model, 0.1), SGDConfig(learning_rate=0.3))


def plain_losses(name: str) -> list[float]:
    model, optimizer = build(name, recomputed=False)
    batch, losses = batch_for(name), []
    for _ in range(STEPS):
        sums = model(batch)
        (sums.objective / batch.target_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sums.nll.item() / batch.target_tokens)
    return losses


def sharded_losses(world: World, cases: list[tuple[str, bool, bool]]) -> list[list[float]]:
    """Runs in one rank, which partitions like many do: a weight is empty outside its module's forward."""
    deepspeed = load_deepspeed(torch.device("cpu"))
    return [_train_sharded(deepspeed, world, *case) for case in cases]


def _train_sharded(deepspeed: Any, world: World, name: str, recomputed: bool, bf16: bool) -> list[float]:
    model, optimizer = build(name, recomputed)
    settings = {
        "train_batch_size": world.size,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": bf16},
        # Threshold 0: not even a bias stays whole outside its module.
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 5000},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # DeepSpeed's own default is 1.0
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    batch, losses = batch_for(name), []
    for _ in range(STEPS):
        sums = engine(batch)
        engine.backward(sums.objective / batch.target_tokens)
        engine.step()
        losses.append(sums.nll.item() / batch.target_tokens)
    engine.destroy()
    return losses


def test_training_with_partitioned_parameters_equals_the_plain_loop() -> None:
    results = run_ranks(sharded_losses, ranks=1, arguments={"cases": CASES}, timeout_s=200)
    for rank in results:
        for (name, _, bf16), losses in zip(CASES, rank.value, strict=True):
            assert losses == pytest.approx(plain_losses(name), rel=5e-3 if bf16 else 1e-5), (name, bf16)
            assert losses[-1] < losses[0]
