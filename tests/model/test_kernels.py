"""Compiled parts: as near to fp64 as eager ones, never eager in silence, and a killed run goes on bit for bit.

Compilation takes tens of seconds, so all of it is done once, into one cache, by processes without the type hook,
which a compiler would have to follow.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from pretrain.checkpoint import list_checkpoints, weights_sha256
from pretrain.config import diff_configs
from pretrain.config.schema import LossConfig, RunConfig
from pretrain.errors import PretrainError, UserError
from pretrain.loss.fused import LossOptions, fused_linear_cross_entropy
from pretrain.model import kernels
from pretrain.model.layers import RMSNorm, gated_gelu, gated_silu, rms_norm
from pretrain.model.positions import rotate
from pretrain.model.registry import build_model
from pretrain.rundir import RunDirectory
from pretrain.topology import World
from tests.model import fake_liger
from tests.model.small import FAMILIES, VOCABULARY, batch_for, decoder_config
from tests.ranks import run_ranks
from tests.tiny import build_tiny, steps_of

ROOT = Path(__file__).resolve().parents[2]


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
    model = decoder_config(kernels="compiled").model_dump()
    return RunConfig.model_validate(
        {
            "name": "small", "seed": 3, "tokenizer": "none", "data": {"sources": {"none": {"path": "none"}}},
            "model": model, "batch": {"global_batch_size": 1, "micro_batch_size": 1, "sequence_length": 32},
            "optimizer": {"kind": "adamw", "learning_rate": 1e-2}, "schedule": {"kind": "constant", "total_steps": 4},
            "checkpoint": {"every_steps": 2}, "engine": {"zero_stage": 3, "precision": "fp32"},
        }
    )  # fmt: skip


def errors_of_both_kinds(world: World) -> dict[str, Any]:
    """Errors of compiled and of eager parts, and what is said where a function meets more shapes than it may."""
    import torch._dynamo.config as dynamo

    use = kernels._compiled()
    eager = {function: function for function in use if function is not kernels.chunk_formula}
    result: dict[str, Any] = {"compiled": errors(use, torch.float32), "eager": errors(eager, torch.float32)}
    result["graphs"] = kernels._graphs()
    dynamo.recompile_limit = 1
    storm = kernels.Compiled(_doubles)
    result["storm"] = [_message(storm, torch.ones(size)) for size in (3, 4)]
    return result


def what_cannot_be_compiled(world: World) -> dict[str, str]:
    """What is said to a graph break and to a compiler that is switched off; neither needs a C++ compiler."""
    kernels._compiled()
    broken = _message(kernels.Compiled(_breaks), torch.ones(3))
    with torch.compiler.set_stance("force_eager"):
        return {"break": broken, "eager in silence": _message(kernels.Compiled(_doubles), torch.ones(3))}


def _message(function: Callable[..., Any], x: torch.Tensor) -> str:
    try:
        function(x)
    except PretrainError as error:
        return str(error)
    return ""


def _breaks(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum().item() > 0 else x


def _doubles(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_graph_break_and_a_compiler_that_is_off_are_errors() -> None:
    (only,) = run_ranks(what_cannot_be_compiled, ranks=1, timeout_s=100)
    assert "_breaks was not compiled as one graph" in only.value["break"]
    assert "_doubles ran without being compiled" in only.value["eager in silence"]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_compiled_parts_are_as_exact_as_eager_ones_and_too_many_shapes_are_an_error(tmp_path: Path) -> None:
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    (only,) = run_ranks(errors_of_both_kinds, ranks=1, timeout_s=400, environment=environment)
    found = only.value
    assert found["compiled"].keys() == PARTS.keys()
    for kind in ("compiled", "eager"):
        assert all(error < 2e-6 for error in found[kind].values()), (kind, found[kind])
    assert found["graphs"] >= len(PARTS)
    assert found["storm"][0] == ""
    assert "_doubles was not compiled as one graph for these shapes" in found["storm"][1]


def _weights(home: Path, name: str) -> str:
    run = RunDirectory.locate(str(home / name))
    return weights_sha256(run.checkpoints, list_checkpoints(run.checkpoints)[0].name)


def _spawn(home: Path, arguments: list[str], cache: Path | None) -> subprocess.Popen[str]:
    environment = {**os.environ, "PRETRAIN_HOME": str(home), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if cache is not None:
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    return subprocess.Popen(
        [sys.executable, "-m", "pretrain", *arguments], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_a_compiled_run_keeps_its_cache_and_goes_on_bit_for_bit_after_a_kill(tmp_path: Path) -> None:
    tiny = build_tiny(tmp_path)
    steps = ["model.kernels=compiled", "model.qk_norm=off", "schedule.total_steps=12", "checkpoint.every_steps=3"]
    whole = _spawn(tmp_path, tiny.decoder("name=whole", *steps), None)
    output, _ = whole.communicate(timeout=400)
    assert whole.returncode == 0, output[-4000:]
    cache = tmp_path / "whole" / "compiled"
    assert f"cache={cache}" in output
    compiled = set(cache.rglob("*.so"))
    assert compiled
    # The second run reads the first one's cache, because it is told to: nothing is compiled again.
    killed = _spawn(tmp_path, tiny.decoder("name=killed", *steps), cache)
    deadline = time.monotonic() + 200
    while max(steps_of(tmp_path / "killed"), default=0) < 5:
        assert killed.poll() is None, killed.communicate()[0][-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    killed.kill()
    killed.communicate()
    resumed = _spawn(tmp_path, tiny.decoder("name=killed", *steps, "--resume", "must"), cache)
    output, _ = resumed.communicate(timeout=200)
    assert resumed.returncode == 0, output[-4000:]
    assert set(cache.rglob("*.so")) == compiled
    assert not (tmp_path / "killed" / "compiled").exists()
    untouched, again = steps_of(tmp_path / "whole"), steps_of(tmp_path / "killed")
    assert [again[step]["loss"] for step in untouched] == [record["loss"] for record in untouched.values()]
    assert _weights(tmp_path, "killed") == _weights(tmp_path, "whole")


@pytest.mark.parametrize("family", ["decoder", "gemma_3"])
def test_liger_is_called_as_it_documents_and_writes_over_nothing_that_is_read_again(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "is_installed", lambda name: name == "liger_kernel")
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", fake_liger)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name in ("eager", "liger"):
        config = FAMILIES[family](kernels=name)
        model = build_model(config, LossConfig(), seed=1, activation_checkpointing=False)
        model(batch_for(config)).objective.backward()
        found[name] = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        norms = {module.compute for module in model.modules() if isinstance(module, RMSNorm)}
        assert (kernels.rms_norm in norms) == (name == "eager")
    for key, gradient in found["eager"].items():
        bound = 1e-5 * float(gradient.abs().max())
        torch.testing.assert_close(found["liger"][key], gradient, rtol=0, atol=bound, msg=key)


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
