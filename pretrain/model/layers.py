"""The small parts that every family is made of: projections, embeddings, norms, feed-forward blocks.

Each module owns every parameter that its forward uses, so that ZeRO-3 gathers them, and says how they
start (`initial`). All of them work with the whole module cast to bf16: norm statistics are fp32. What is no
matrix product is a pure function that a module holds as `compute`, so that it can be replaced (`compiled`).
Sources: RMSNorm, Zhang and Sennrich 2019; LayerNorm, Ba et al. 2016; SwiGLU and gated GELU, Shazeer 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from pretrain.model.init import Constant, Initial, Normal


class Linear(nn.Module):
    """x W^T + b with the rule of its initial weights stated where it is built.

    Attributes:
        learning_rate_scale: share of the learning rate that its matrix gets.
    """

    learning_rate_scale: float = 1.0

    def __init__(self, width_in: int, width_out: int, initial: Initial, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width_out, width_in))
        self.bias = nn.Parameter(torch.empty(width_out)) if bias else None
        self.initial: dict[str, Initial] = {"weight": initial, "bias": Constant(0.0)}

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """Rows of a table by token id."""

    def __init__(self, vocabulary_size: int, width: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary_size, width))
        self.initial: dict[str, Initial] = {"weight": Normal(std)}

    def forward(self, ids_T: Int[Tensor, " T"]) -> Float[Tensor, "T D"]:
        return functional.embedding(ids_T, self.weight)


class RMSNorm(nn.Module):
    """x / rms(x) in fp32, cast back, times a weight (the order of Llama).

    Args:
        around_one: the factor is 1 + weight, the weight starts at 0 and the product is fp32 (Gemma).
    """

    def __init__(self, width: int, eps: float, *, around_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps
        self.around_one = around_one
        self.compute = rms_norm
        self.initial: dict[str, Initial] = {"weight": Constant(0.0 if around_one else 1.0)}

    def forward(self, x: Tensor) -> Tensor:
        if not self.around_one:
            return self.compute(x, self.weight, self.eps)
        factor = 1.0 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        return self.compute(x, factor, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x), in fp32, times the weight: before the product rounded to the dtype of x where the weight has it."""
    return _RMSNormFunction.apply(x, weight, eps)


class _RMSNormFunction(torch.autograd.Function):
    """One pass each way with in-place fp32 scratch: 0.7 of the time of functional.rms_norm in bf16 on CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse_rms = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse_rms)
        unit = wide * inverse_rms
        if weight.dtype == x.dtype:
            return unit.to(x.dtype).mul_(weight)
        return unit.mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        unit = x.to(inverse_rms.dtype) * inverse_rms
        grad = grad_out.to(inverse_rms.dtype)
        along = grad * unit
        grad_weight = along.reshape(-1, x.shape[-1]).sum(dim=0)
        mean = (along @ weight.to(along.dtype)).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = (grad * weight).addcmul_(unit, mean, value=-1.0).mul_(inverse_rms)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class LayerNorm(nn.Module):
    """(x - mean) / std with weight and bias; torch's kernel keeps the statistics in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.eps = eps
        self.initial: dict[str, Initial] = {"weight": Constant(1.0), "bias": Constant(0.0)}

    def forward(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        return functional.layer_norm(x_TD, self.weight.shape, self.weight, self.bias, self.eps)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one matrix, gate first."""

    def __init__(self, width: int, feed_forward_width: int, inner: Initial, outer: Initial) -> None:
        super().__init__()
        self.gate_up = Linear(width, 2 * feed_forward_width, inner)
        self.down = Linear(feed_forward_width, width, outer)
        self.compute = gated_silu

    def forward(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        return self.down(self.compute(self.gate_up(x_TD)))


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half of the last dimension."""
    return _GatedSilu.apply(gate_up)


def gated_gelu(gate_up: Tensor) -> Tensor:
    """gelu(first half) * second half of the last dimension, GELU in its tanh form."""
    return _GatedGelu.apply(gate_up)


class _GatedSilu(torch.autograd.Function):
    """silu(gate) * up of one [T, 2F] tensor; the gradient is written into one tensor, without a concatenation."""

    @staticmethod
    def forward(ctx: Any, gate_up_T2F: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_T2F)
        gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
        return functional.silu(gate_TF).mul_(up_TF)

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> Tensor:
        (gate_up_T2F,) = ctx.saved_tensors
        gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
        grad_gate_up_T2F = torch.empty_like(gate_up_T2F)
        grad_gate_TF, grad_up_TF = grad_gate_up_T2F.chunk(2, dim=-1)
        torch.mul(functional.silu(gate_TF), grad_TF, out=grad_up_TF)
        grad_gate_TF.copy_(torch.ops.aten.silu_backward(grad_TF * up_TF, gate_TF))
        return grad_gate_up_T2F


class _GatedGelu(torch.autograd.Function):
    """As `_GatedSilu`, but the activated half is kept: GELU takes longer than reading it."""

    @staticmethod
    def forward(ctx: Any, gate_up_T2F: Tensor) -> Tensor:
        gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
        activated_TF = functional.gelu(gate_TF, approximate="tanh")
        ctx.save_for_backward(gate_up_T2F, activated_TF)
        return activated_TF * up_TF

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> Tensor:
        gate_up_T2F, activated_TF = ctx.saved_tensors
        gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
        grad_gate_up_T2F = torch.empty_like(gate_up_T2F)
        grad_gate_TF, grad_up_TF = grad_gate_up_T2F.chunk(2, dim=-1)
        torch.mul(activated_TF, grad_TF, out=grad_up_TF)
        grad_gate_TF.copy_(torch.ops.aten.gelu_backward(grad_TF * up_TF, gate_TF, approximate="tanh"))
        return grad_gate_up_T2F


Activation = Literal["relu", "gelu", "gelu_tanh"]
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


class FeedForward(nn.Module):
    """outer(activation(inner(x))); with ReLU and biases the block of 2017, with GELU that of BERT and GPT-2."""

    def __init__(
        self,
        width: int,
        feed_forward_width: int,
        inner: Initial,
        outer: Initial,
        *,
        activation: Activation = "relu",
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.inner = Linear(width, feed_forward_width, inner, bias=bias)
        self.outer = Linear(feed_forward_width, width, outer, bias=bias)
        self.activation = _ACTIVATIONS[activation]

    def forward(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        return self.outer(self.activation(self.inner(x_TD)))


class GatedGelu(nn.Module):
    """down(gelu(gate(x)) * up(x)), GELU in its tanh form (T5 v1.1, Gemma); gate and up are one matrix, gate first."""

    def __init__(self, width: int, feed_forward_width: int, inner: Initial, outer: Initial) -> None:
        super().__init__()
        self.gate_up = Linear(width, 2 * feed_forward_width, inner)
        self.down = Linear(feed_forward_width, width, outer)
        self.compute = gated_gelu

    def forward(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        return self.down(self.compute(self.gate_up(x_TD)))
