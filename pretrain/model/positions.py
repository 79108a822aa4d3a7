"""Where a token stands: rotary angles and sinusoids, from positions that restart in every document.

Both are computed on the fly in fp32 and are no buffers, because casting the module to bf16 would round
them (position 257 would become 256). Sources: Su et al. 2021 (half-split pairs as in Llama); Vaswani et
al. 2017 section 3.5 (sine and cosine interleaved).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

Rotary = tuple[Tensor, Tensor]
"""cos and sin of the angles, each [T, 1, K/2], in the dtype of what is rotated."""


def _frequencies(count: int, theta: float, device: torch.device) -> Tensor:
    """theta^(-i/count) for i < count, fp32."""
    return 1.0 / theta ** (torch.arange(count, device=device, dtype=torch.float32) / count)


@torch.no_grad()
def rotary_angles(positions_T: Int[Tensor, " T"], head_width: int, theta: float, dtype: torch.dtype) -> Rotary:
    """cos and sin for `rotate`; the angles are fp32, the results are cast once for all layers."""
    frequencies = _frequencies(head_width // 2, theta, positions_T.device)
    angles = torch.outer(positions_T.to(torch.float32), frequencies).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_THK: Float[Tensor, "T H K"], rotary: Rotary) -> Float[Tensor, "T H K"]:
    """Turns dimension pairs (i, i + K/2) of each head by their angle."""
    return _Rotate.apply(x_THK, *rotary)


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the rotation back: nothing of x is kept."""

    @staticmethod
    def forward(ctx: Any, x_THK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x_THK, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad_THK: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad_THK, cos, sin, -1.0), None, None


def _turn(x_THK: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    out_THK = torch.empty(x_THK.shape, dtype=x_THK.dtype, device=x_THK.device)
    first, second = x_THK.chunk(2, dim=-1)
    out_first, out_second = out_THK.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin, value=direction)
    return out_THK


@torch.no_grad()
def sinusoids(positions_T: Int[Tensor, " T"], width: int) -> Float[Tensor, "T D"]:
    """sin(p / 10000^(2i/D)) in column 2i and the cosine in column 2i + 1, fp32."""
    angles = torch.outer(positions_T.to(torch.float32), _frequencies(width // 2, 10000.0, positions_T.device))
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)
