"""What computes the parts that are no matrix product and no attention: `model.kernels`.

Takes a built model -> the same with each `compute`, `rotate` and the loss's chunk replaced. Only pure functions
of tensors are compiled, each as one graph of static shapes: a module's weights are whole only inside its own
forward (ZeRO-3), and attention loops over documents, whose number changes. A graph break, a recompile limit
or a compiler that is switched off is an error, never eager computation in silence.
Compiled and eager code round differently (both within 2e-6 of fp64 in fp32), so a resume keeps what began.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from pretrain.errors import PretrainError, UserError
from pretrain.loss.fused import chunk_formula
from pretrain.model.attention.need import is_installed
from pretrain.model.head import Head
from pretrain.model.layers import gated_gelu, gated_silu, rms_norm
from pretrain.model.positions import rotate

Kernels = Literal["eager", "compiled", "liger"]
_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_RECOMPILES = 32  # shapes of one function: widths of norms, both sides of a pair model, the rest of a last chunk


def use_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Replaces the functions of every module.

    Raises:
        UserError: these kernels cannot run here.
    """
    if kernels == "eager":
        return
    replacements = _compiled() if kernels == "compiled" else _liger()
    for module in model.modules():
        for attribute in ("compute", "rotate"):
            function = getattr(module, attribute, None)
            if function in replacements:
                setattr(module, attribute, replacements[function])
        if isinstance(module, Head) and kernels == "compiled":
            module.loss_options = replace(module.loss_options, chunk=replacements[chunk_formula])


def keep_compiled(folder: Path | None) -> str:
    """Compiled code goes to `folder`, so that the next start finds it; gives where it goes.

    None, or a TORCHINDUCTOR_CACHE_DIR of the user's, leaves it where torch puts it. Before anything is compiled.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    # Importing torch._dynamo writes the default into the variable.
    if folder is not None and os.environ.get(_CACHE, default_cache_dir()) == default_cache_dir():
        os.environ[_CACHE] = str(folder)
    return cache_dir()


class Compiled:
    """A pure function that torch compiles at its first call for each shape, whole or not at all."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        self._function = torch.compile(function, fullgraph=True, dynamic=False)
        self._proved = False

    def __call__(self, *args: Any) -> Any:
        """
        Raises:
            PretrainError: it cannot be one graph, has met too many shapes, or was not compiled.
        """
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        try:
            if self._proved:
                return self._function(*args)
            before = _graphs()
            result = self._function(*args)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            raise PretrainError(
                f"model.kernels=compiled: {self.name} was not compiled as one graph for these shapes "
                f"({type(error).__name__}: {str(error).strip().splitlines()[0]}). Nothing is computed eagerly in its "
                "place. Set model.kernels=eager in a new run, and report this."
            ) from error
        if _graphs() == before:
            raise PretrainError(
                f"model.kernels=compiled: {self.name} ran without being compiled. Something switched the compiler off. "
                "Unset TORCHDYNAMO_DISABLE and torch.compiler.set_stance, or set model.kernels=eager in a new run."
            )
        self._proved = True
        return result


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


# What is compiled is written plainly: the compiler makes one pass of it and finds its gradient.


def _plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    unit = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if weight.dtype == x.dtype:
        return unit.to(x.dtype) * weight
    return (unit * weight).to(x.dtype)


def _plain_gated_silu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _plain_gated_gelu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def _plain_rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = rotary
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


_PLAIN: dict[Callable[..., Any], Callable[..., Any]] = {
    rms_norm: _plain_rms_norm,
    gated_silu: _plain_gated_silu,
    gated_gelu: _plain_gated_gelu,
    rotate: _plain_rotate,
    chunk_formula: chunk_formula,
}


def _compiled() -> dict[Callable[..., Any], Callable[..., Any]]:
    import torch._dynamo.config as dynamo

    if dynamo.disable or os.environ.get("TORCHDYNAMO_DISABLE", "0") not in ("", "0"):
        raise UserError(
            "model.kernels=compiled cannot run: torch's compiler is switched off (TORCHDYNAMO_DISABLE). Compiled code "
            "is never replaced silently. Unset it, or set model.kernels=eager."
        )
    if not torch.cuda.is_available() and shutil.which(os.environ.get("CXX", "g++")) is None:
        raise UserError(
            "model.kernels=compiled cannot run: torch compiles for the CPU with a C++ compiler, and there is none. "
            "Install g++, name one in CXX, or set model.kernels=eager."
        )
    dynamo.suppress_errors = False
    dynamo.fail_on_recompile_limit_hit = True
    dynamo.recompile_limit = max(dynamo.recompile_limit, _RECOMPILES)
    return {eager: Compiled(plain) for eager, plain in _PLAIN.items()}


def _liger() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The kernels of Hsu et al. 2024 for norms and gates; the fused loss is our own."""
    if not torch.cuda.is_available() or not is_installed("liger_kernel"):
        missing = "there is no CUDA device" if not torch.cuda.is_available() else "liger-kernel is not installed"
        raise UserError(
            f"model.kernels=liger cannot run: {missing}. Named kernels are never replaced silently. "
            "Set model.kernels=compiled or eager."
        )
    operators = importlib.import_module("liger_kernel.ops")

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # Not in place: it would write over a gradient that the other side of a sum (behind a sublayer) reads too.
        found: Tensor = operators.LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)
        return found

    def gated(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        found: Tensor = operators.LigerSiLUMulFunction.apply(gate.contiguous(), up.contiguous())
        return found

    return {rms_norm: norm, gated_silu: gated}
