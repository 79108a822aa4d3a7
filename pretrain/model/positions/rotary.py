"""Rotary positions: cos and sin of the angles, once per micro-batch, and the rotation of queries and keys.

Source: Su et al. 2021; half-split pairs (i, i + K/2) as in Llama.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pretrain.config.schema import RopeScaling
from pretrain.model.positions.scaling import rotary_frequencies

Rotary = tuple[Tensor, Tensor]
"""cos and sin of the angles (times the scaling's factor), each [T, 1, K/2], in the dtype of what is rotated."""


@torch.no_grad()
def rotary_angles(
    positions_T: Int[Tensor, " T"],
    head_width: int,
    theta: float,
    dtype: torch.dtype,
    scaling: RopeScaling | None = None,
) -> Rotary:
    """cos and sin for `rotate`; the angles are fp32, the results are cast once for all layers."""
    frequencies, magnitude = rotary_frequencies(head_width, theta, scaling, positions_T.device)
    angles = torch.outer(positions_T.to(torch.float32), frequencies).unsqueeze(1)
    return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)


def rotate(x_THK: Float[Tensor, "T H K"], rotary: Rotary) -> Float[Tensor, "T H K"]:
    """Turns dimension pairs (i, i + K/2) of each head by their angle."""
    return _Rotate.apply(x_THK, *rotary)


class _Rotate(torch.autograd.Function):
    """The gradient of a (scaled) rotation is the rotation back, scaled alike: nothing of x is kept."""

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
