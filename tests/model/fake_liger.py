"""Liger's operators as their sources document them, in plain torch: they run on no CPU without its interpreter.

Like the real ones they use buffers again in the backward pass: a norm the gradient of its output unless it is told
not to, a gate the inputs that it was given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LigerRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = True,
    ) -> Tensor:
        assert casting_mode == "llama"
        ctx.save_for_backward(x, weight)
        ctx.options = (eps, offset, in_place)
        unit = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        return unit.to(x.dtype) * (weight + offset)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (eps, offset, in_place) = ctx.saved_tensors, ctx.options
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        inner = grad.float() * (weight + offset)
        dx = scale * (inner - wide * scale.square() * (inner * wide).mean(-1, keepdim=True))
        dw = (grad.float() * wide * scale).flatten(0, -2).sum(0).to(weight.dtype)
        found = grad.copy_(dx) if in_place else dx.to(x.dtype)
        return found, dw, None, None, None, None


class LigerSiLUMulFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.kept = gate.detach(), up.detach()
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.kept
        share = torch.sigmoid(gate)
        silu = gate * share
        d_up = grad * silu
        gate.copy_(grad * (silu * (1 - share) + share) * up)
        up.copy_(d_up)
        return gate, up
