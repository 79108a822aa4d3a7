"""Kernels that cannot run here are refused by name, and a run keeps those that it began with."""

from __future__ import annotations

import pytest

from pretrain.config import diff_configs
from pretrain.config.schema import LossConfig, RunConfig
from pretrain.errors import UserError
from pretrain.model.registry import build_model
from tests.model.small import VOCABULARY, decoder_config


def run_config() -> RunConfig:
    model = decoder_config(dropout=0.1, qk_norm=True, kernels="compiled").model_dump()
    return RunConfig.model_validate(
        {
            "name": "small", "seed": 3, "tokenizer": "none", "data": {"sources": {"none": {"path": "none"}}},
            "model": model, "batch": {"global_batch_size": 1, "micro_batch_size": 1, "sequence_length": 32},
            "optimizer": {"kind": "adamw", "learning_rate": 1e-2}, "schedule": {"kind": "constant", "total_steps": 4},
            "checkpoint": {"every_steps": 2}, "engine": {"zero_stage": 3, "precision": "fp32"},
        }
    )  # fmt: skip


def test_kernels_that_cannot_run_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"model\.kernels=liger cannot run: there is no CUDA device"):
        build_model(decoder_config(kernels="liger"), LossConfig(), seed=1)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"model\.kernels=compiled cannot run: .* C\+\+ compiler, and there is none"):
        build_model(decoder_config(kernels="compiled"), LossConfig(), seed=1)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(UserError, match=r"torch's compiler is switched off \(TORCHDYNAMO_DISABLE\)"):
        build_model(decoder_config(kernels="compiled"), LossConfig(), seed=1)


def test_a_compiled_run_is_not_resumed_eager() -> None:
    config = run_config()
    eager = config.model_copy(update={"model": config.model.model_copy(update={"kernels": "eager"})})
    assert [(change.field, change.policy) for change in diff_configs(config, eager)] == [("model.kernels", "refused")]
    assert config.model.vocabulary_size == VOCABULARY
