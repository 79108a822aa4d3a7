"""Compiled parts: as near to fp64 as eager ones, never eager in silence, resumed bit for bit by another process.

Compilation takes tens of seconds, so two rank processes do all of it; they run without the type hook, which a
compiler would have to follow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from pretrain.checkpoint import restore, save
from pretrain.config import diff_configs
from pretrain.config.schema import LossConfig, RunConfig
from pretrain.engine.engine import Engine
from pretrain.errors import UserError
from pretrain.loss.fused import LossOptions, fused_linear_cross_entropy
from pretrain.model import kernels
from pretrain.model.layers import gated_gelu, gated_silu, rms_norm
from pretrain.model.positions import rotate
from pretrain.model.registry import build_model
from pretrain.store import open_store
from pretrain.topology import World
from tests.model.small import VOCABULARY, decoder_config, lm_batch
from tests.ranks import run_ranks


def _inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {
        "x": (40, 32),
        "weight": (32,),
        "heads": (40, 4, 16),
        "cos": (40, 1, 8),
        "sin": (40, 1, 8),
        "table": (101, 32),
    }
    return {name: torch.randn(size, generator=generator, dtype=torch.float64) for name, size in sizes.items()}


# name -> (function of a table of implementations and inputs, inputs that get gradients, the definition)
PARTS: dict[str, tuple[Callable[..., torch.Tensor], tuple[str, ...], Callable[..., torch.Tensor]]] = {
    "rms_norm": (
        lambda use, i: use[rms_norm](i["x"], i["weight"], 1e-5), ("x", "weight"),
        lambda i: i["x"] / (i["x"].square().mean(-1, keepdim=True) + 1e-5).sqrt() * i["weight"],
    ),
    "gated_silu": (
        lambda use, i: use[gated_silu](i["x"]), ("x",),
        lambda i: i["x"][:, :16] / (1 + (-i["x"][:, :16]).exp()) * i["x"][:, 16:],
    ),
    "gated_gelu": (
        lambda use, i: use[gated_gelu](i["x"]), ("x",),
        lambda i: functional.gelu(i["x"][:, :16], approximate="tanh") * i["x"][:, 16:],
    ),
    "rotate": (
        lambda use, i: use[rotate](i["heads"], (i["cos"], i["sin"])), ("heads",),
        lambda i: torch.view_as_real(
            torch.complex(i["heads"][..., :8], i["heads"][..., 8:]) * torch.complex(i["cos"], i["sin"])
        ).transpose(-1, -2).flatten(-2),
    ),
    "loss": (
        lambda use, i: fused_linear_cross_entropy(
            i["x"], i["table"], _labels(), LossOptions(0.1, 0.01, 17, 2.5, use.get(kernels.chunk_formula))
        ).objective,
        ("x", "table"),
        lambda i: _plain_loss(i["x"], i["table"]),
    ),
}  # fmt: skip


def _labels() -> torch.Tensor:
    labels = torch.arange(40) * 2
    labels[[0, 7, 39]] = -100
    return labels


def _plain_loss(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    logits = 2.5 * torch.tanh(x @ table.T / 2.5)
    loss = functional.cross_entropy(logits, _labels(), reduction="sum", label_smoothing=0.1)
    return loss + 0.01 * torch.logsumexp(logits, 1).square()[_labels() >= 0].sum()


def _values(compute: Callable[..., torch.Tensor], wanted: tuple[str, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    inputs = {name: tensor.to(dtype) for name, tensor in _inputs().items()}
    leaves = [inputs[name].requires_grad_() for name in wanted]
    out = compute(inputs)
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def errors(use: dict[Any, Any], dtype: torch.dtype) -> dict[str, float]:
    """Largest relative error (Frobenius) of value and gradients against the definition in fp64."""
    found = {}
    for name, (compute, wanted, definition) in PARTS.items():
        right = _values(definition, wanted, torch.float64)
        ours = _values(lambda inputs, compute=compute: compute(use, inputs), wanted, dtype)
        found[name] = max(float((a.double() - b).norm() / b.norm()) for a, b in zip(ours, right, strict=True))
    return found


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


def train(engine: Engine, steps: range) -> str:
    """Trains and gives the hash of all state."""
    for step in steps:
        batch = lm_batch((20, 12), seed=step)
        engine.micro_step(batch, global_target_tokens=batch.target_tokens)
        assert engine.step(1e-2).applied
    digest = hashlib.sha256()
    for fragment in engine.fragments():
        for key in sorted(fragment.tensors):
            digest.update(fragment.tensors[key].numpy().tobytes())
    return digest.hexdigest()


def first_process(world: World, folder: str) -> dict[str, Any]:
    """Errors of both kinds; four compiled steps, saved after two."""
    config = run_config()
    use = kernels._compiled()
    eager = {function: function for function in use if function is not kernels.chunk_formula}
    result: dict[str, Any] = {"compiled": errors(use, torch.float32), "eager": errors(eager, torch.float32)}
    engine = Engine(build_model(config.model, config.loss, seed=3), config, world, torch.device("cpu"))
    train(engine, range(2))
    store = open_store(folder)
    save(store, engine, step=2, attempt=1, training_state={}, world=world, guard=lambda: None).wait()
    result["hash"] = train(engine, range(2, 4))
    engine.close()
    try:
        kernels.Compiled(_breaks)(torch.ones(3))
    except Exception as error:
        result["break"] = type(error).__name__
    return result


def _breaks(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum().item() > 0 else x


def second_process(world: World, folder: str) -> str:
    """Goes on from the checkpoint."""
    config = run_config()
    engine = Engine(build_model(config.model, config.loss, seed=99), config, world, torch.device("cpu"))
    assert restore(open_store(folder), engine, world) is not None
    return train(engine, range(2, 4))


def test_compiled_parts_are_as_exact_as_eager_ones_and_resumed_bit_for_bit(tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path / "checkpoints")}
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PRETRAIN_NO_TYPE_HOOK": "1"}
    (first,) = run_ranks(first_process, ranks=1, arguments=arguments, timeout_s=280, environment=environment)
    assert first.value["compiled"].keys() == PARTS.keys()
    for kind in ("compiled", "eager"):
        assert all(error < 2e-6 for error in first.value[kind].values()), (kind, first.value[kind])
    assert first.value["break"] == "Unsupported"
    (second,) = run_ranks(second_process, ranks=1, arguments=arguments, timeout_s=280, environment=environment)
    assert second.value == first.value["hash"]


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
