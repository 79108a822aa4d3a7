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
from pretrain.model.attention.pieces import AddedScores, reach_of
from pretrain.model.attention.rules import AttentionRules
from pretrain.sequence import SeqInfo

Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor | None]


class BlockKernel(NamedTuple):
    """What a backend does with q [H, rows, K], k and v [G, keys, K] of one block and what is added to its scores.

    That is [H, rows, keys] with a bias, [1, rows, keys] with a mask only, at least fp32, or None.

    Attributes:
        forward: (q, k, v, added, block, rules) -> [H, rows, K].
        backward: (q, k, v, added, gradient of the result, block, rules) -> those of q, k, v, and of what was added
            where there is a bias.
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
    """Views are taken of tensors with heads first, once: short documents wait for each call of torch."""

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
        added = AddedScores(blocks, rules, reach, tensors, q_THK.device, _wide(q_THK))
        q_HTK, k_GTK, v_GTK, out_HTK = (x.transpose(0, 1) for x in (q_THK, k_TGK, v_TGK, out_THK))
        for block in blocks:
            queries, keys = slice(block.q_start, block.q_stop), slice(block.k_start, block.k_stop)
            q, k, v = q_HTK[:, queries], k_GTK[:, keys], v_GTK[:, keys]
            out_HTK[:, queries] = kernel.forward(q, k, v, added.of(block), block, rules)
        return out_THK

    @staticmethod
    def backward(ctx: Any, grad_THK: Tensor) -> tuple[Tensor | None, ...]:
        q_THK, k_TGK, v_TGK, *tensors = ctx.saved_tensors
        dtype = _wide(q_THK)
        dq_THK = torch.zeros(q_THK.shape, dtype=q_THK.dtype, device=q_THK.device)
        dk_TGK, dv_TGK = (torch.zeros(k_TGK.shape, dtype=dtype, device=q_THK.device) for _ in range(2))
        added = AddedScores(ctx.blocks, ctx.rules, ctx.reach, tensors, q_THK.device, dtype)
        q_HTK, k_GTK, v_GTK, grad_HTK = (x.transpose(0, 1) for x in (q_THK, k_TGK, v_TGK, grad_THK))
        dq_HTK, dk_GTK, dv_GTK = (x.transpose(0, 1) for x in (dq_THK, dk_TGK, dv_TGK))
        for block in ctx.blocks:
            queries, keys = slice(block.q_start, block.q_stop), slice(block.k_start, block.k_stop)
            q, k, v, grad = q_HTK[:, queries], k_GTK[:, keys], v_GTK[:, keys], grad_HTK[:, queries]
            dq, dk, dv, d_added = ctx.kernel.backward(q, k, v, added.of(block), grad, block, ctx.rules)
            dq_HTK[:, queries] = dq
            dk_GTK[:, keys].add_(dk)
            dv_GTK[:, keys].add_(dv)
            if d_added is not None:
                added.add_gradient(block, d_added)
        of_tensors = added.gradients(tensors, ctx.needs_input_grad[7:])
        return dq_THK, dk_TGK.to(k_TGK.dtype), dv_TGK.to(v_TGK.dtype), None, None, None, None, *of_tensors


def _wide(x: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)
