"""Attention by blocks of queries, each against the keys that it can see, as one autograd function.

A backend says what one block does, forward and backward. Only q, k and v are kept for the backward pass, and gradients
of keys are summed in place, so that memory grows with T and never with T^2. Shared by `qblock` and `sdpa`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pretrain.model.attention.blocks import Block, plan_blocks
from pretrain.model.attention.pieces import (
    add_diagonals,
    bias_diagonals,
    expand_diagonals,
    heads_first,
    reach_of,
    tensor_gradients,
)
from pretrain.model.attention.rules import AttentionRules
from pretrain.sequence import SeqInfo

Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor | None]


class BlockKernel(NamedTuple):
    """What a backend does with q [H, rows, K], k and v [G, keys, K] and the bias [H, rows, keys] of one block.

    Attributes:
        forward: (q, k, v, bias, block, rules) -> [H, rows, K].
        backward: (q, k, v, bias, gradient of the result, block, rules) -> those of q, k, v, and of the bias where
            there is one.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None, Block, AttentionRules], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor, Block, AttentionRules], Gradients]


def attend_blocks(
    kernel: BlockKernel,
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    q_info: SeqInfo,
    k_info: SeqInfo,
    rules: AttentionRules,
) -> Tensor:
    """[T, H, K]; first derivatives only."""
    blocks = plan_blocks(
        q_info.lengths, k_info.lengths, causal=rules.causal, window=rules.window, num_heads=q_THK.shape[1]
    )
    tensors = () if rules.bias is None else rules.bias.tensors
    return _Blocked.apply(q_THK, k_TGK, v_TGK, kernel, blocks, rules, reach_of(q_info, k_info), *tensors)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGK: Tensor,
        kernel: BlockKernel,
        blocks: Sequence[Block],
        rules: AttentionRules,
        reach: int,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(q_THK, k_TGK, v_TGK, *tensors)
        ctx.kernel, ctx.blocks, ctx.rules, ctx.reach = kernel, blocks, rules, reach
        out_THK = torch.zeros(q_THK.shape, dtype=q_THK.dtype, device=q_THK.device)
        diagonals_HR = bias_diagonals(rules, reach, q_THK.device, tensors)
        for block in blocks:
            q, k, v = heads_first(q_THK, k_TGK, v_TGK, block)
            bias = None if diagonals_HR is None else expand_diagonals(diagonals_HR, block, reach)
            out_THK[block.q_start : block.q_stop] = kernel.forward(q, k, v, bias, block, rules).transpose(0, 1)
        return out_THK

    @staticmethod
    def backward(ctx: Any, grad_THK: Tensor) -> tuple[Tensor | None, ...]:
        q_THK, k_TGK, v_TGK, *tensors = ctx.saved_tensors
        rules, reach = ctx.rules, ctx.reach
        dtype = torch.promote_types(q_THK.dtype, torch.float32)
        dq_THK = torch.zeros(q_THK.shape, dtype=q_THK.dtype, device=q_THK.device)
        dk_TGK, dv_TGK = (torch.zeros(k_TGK.shape, dtype=dtype, device=q_THK.device) for _ in range(2))
        diagonals_HR = bias_diagonals(rules, reach, q_THK.device, tensors)
        d_diagonals_HR = None if diagonals_HR is None else torch.zeros_like(diagonals_HR, dtype=dtype)
        for block in ctx.blocks:
            q, k, v = heads_first(q_THK, k_TGK, v_TGK, block)
            bias = None if diagonals_HR is None else expand_diagonals(diagonals_HR, block, reach)
            grad = grad_THK[block.q_start : block.q_stop].transpose(0, 1)
            dq, dk, dv, d_bias = ctx.kernel.backward(q, k, v, bias, grad, block, rules)
            dq_THK[block.q_start : block.q_stop] = dq.transpose(0, 1)
            dk_TGK[block.k_start : block.k_stop] += dk.transpose(0, 1)
            dv_TGK[block.k_start : block.k_stop] += dv.transpose(0, 1)
            if d_diagonals_HR is not None:
                assert d_bias is not None
                add_diagonals(d_diagonals_HR, d_bias, block, reach)
        of_tensors = tensor_gradients(rules, reach, tensors, d_diagonals_HR, ctx.needs_input_grad[7:])
        return dq_THK, dk_TGK.to(k_TGK.dtype), dv_TGK.to(v_TGK.dtype), None, None, None, None, *of_tensors
