"""Attention on torch's scaled_dot_product_attention alone, forward and backward.

What its kernels do without a mask runs on whole documents, as `split` does it; windows and biases run by
blocks of queries, each under the mask of its own rows and keys, and the backward pass calls the kernel again
with gradients on. So no mask of T x T exists. Beside `qblock`, whose backward pass is written out, it is the
slower and independent way to the same numbers. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pretrain.model.attention.blocks import Block, plan_blocks
from pretrain.model.attention.pieces import (
    add_diagonals,
    bias_diagonals,
    block_mask,
    expand_diagonals,
    heads_first,
    reach_of,
    tensor_gradients,
)
from pretrain.model.attention.rules import AttentionRules
from pretrain.model.attention.split import attend_split, sdpa
from pretrain.sequence import SeqInfo


def attend_sdpa(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, q_info: SeqInfo, k_info: SeqInfo, rules: AttentionRules
) -> Tensor:
    """Whole documents, or blocks of queries where a window or a bias needs a mask."""
    reach = reach_of(q_info, k_info)
    if rules.bias is None and (rules.window is None or rules.window >= reach):
        return attend_split(q_THK, k_TGK, v_TGK, q_info, k_info, rules)
    blocks = plan_blocks(
        q_info.lengths, k_info.lengths, causal=rules.causal, window=rules.window, num_heads=q_THK.shape[1]
    )
    tensors = () if rules.bias is None else rules.bias.tensors
    return _MaskedBlocks.apply(q_THK, k_TGK, v_TGK, blocks, rules, reach, *tensors)


class _MaskedBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGK: Tensor,
        blocks: Sequence[Block],
        rules: AttentionRules,
        reach: int,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(q_THK, k_TGK, v_TGK, *tensors)
        ctx.blocks, ctx.rules, ctx.reach = blocks, rules, reach
        out_THK = torch.zeros(q_THK.shape, dtype=q_THK.dtype, device=q_THK.device)
        diagonals_HR = bias_diagonals(rules, reach, q_THK.device, tensors)
        for block in blocks:
            q, k, v = heads_first(q_THK, k_TGK, v_TGK, block)
            bias = None if diagonals_HR is None else expand_diagonals(diagonals_HR, block, reach)
            out_THK[block.q_start : block.q_stop] = _attend(q, k, v, bias, block, rules).transpose(0, 1)
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
            leaves = [x.detach() for x in heads_first(q_THK, k_TGK, v_TGK, block)]
            if diagonals_HR is not None:
                leaves.append(expand_diagonals(diagonals_HR, block, reach))
            with torch.enable_grad():
                leaves = [x.requires_grad_() for x in leaves]
                out = _attend(leaves[0], leaves[1], leaves[2], leaves[3] if leaves[3:] else None, block, rules)
                grad = grad_THK[block.q_start : block.q_stop].transpose(0, 1)
                dq, dk, dv, *d_bias = torch.autograd.grad(out, leaves, grad)
            dq_THK[block.q_start : block.q_stop] = dq.transpose(0, 1)
            dk_TGK[block.k_start : block.k_stop] += dk.transpose(0, 1)
            dv_TGK[block.k_start : block.k_stop] += dv.transpose(0, 1)
            if d_diagonals_HR is not None:
                add_diagonals(d_diagonals_HR, d_bias[0], block, reach)
        of_tensors = tensor_gradients(rules, reach, tensors, d_diagonals_HR, ctx.needs_input_grad[6:])
        return dq_THK, dk_TGK.to(k_TGK.dtype), dv_TGK.to(v_TGK.dtype), None, None, None, *of_tensors


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, block: Block, rules: AttentionRules) -> Tensor:
    """[H, rows, K] from [H, rows, K] and [G, keys, K], under the block's mask and bias."""
    mask = block_mask(block, rules, q.device)
    if bias is not None:
        mask = (bias if mask is None else bias.masked_fill(~mask, -torch.inf)).to(q.dtype).unsqueeze(0)
    return sdpa(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), rules.scale, mask=mask)[0]
