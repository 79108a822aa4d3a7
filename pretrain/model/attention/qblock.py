"""Attention by blocks of queries against the keys that they can see: windows, caps, biases, long documents.

Keeps only q, k and v for the backward pass and computes the weights of each block again, so memory
grows with T and never with T^2; gradients of keys are summed in place. Like `split` it is blind to
other documents, also to NaN in them. Forward runs on the fused kernel of torch where that can do it;
scores and sums are at least fp32. Source: own; the gradient of attention as in Dao et al. 2022, appendix B.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

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
from pretrain.sequence import SeqInfo


def attend_qblock(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, q_info: SeqInfo, k_info: SeqInfo, rules: AttentionRules
) -> Tensor:
    """Any rules, any device and dtype; first derivatives only."""
    blocks = plan_blocks(
        q_info.lengths, k_info.lengths, causal=rules.causal, window=rules.window, num_heads=q_THK.shape[1]
    )
    tensors = () if rules.bias is None else rules.bias.tensors
    return _BlockedAttention.apply(q_THK, k_TGK, v_TGK, blocks, rules, reach_of(q_info, k_info), *tensors)


class _BlockedAttention(torch.autograd.Function):
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
            mask = block_mask(block, rules, q.device)
            bias = None if diagonals_HR is None else expand_diagonals(diagonals_HR, block, reach)
            out_THK[block.q_start : block.q_stop] = _block_forward(q, k, v, mask, bias, block, rules).transpose(0, 1)
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
            q, k, v = (x.to(dtype) for x in heads_first(q_THK, k_TGK, v_TGK, block))
            grad = grad_THK[block.q_start : block.q_stop].transpose(0, 1).to(dtype)
            mask = block_mask(block, rules, q.device)
            bias = None if diagonals_HR is None else expand_diagonals(diagonals_HR, block, reach)
            weights, slope = _weights(q, k, mask, bias, block, rules)
            dq, dk, dv, d_scores = _block_backward(
                q, k, v, grad, weights, slope, _dropped(block, rules, q.shape[0], weights), rules.scale
            )
            dq_THK[block.q_start : block.q_stop] = dq.transpose(0, 1)
            dk_TGK[block.k_start : block.k_stop] += dk.transpose(0, 1)
            dv_TGK[block.k_start : block.k_stop] += dv.transpose(0, 1)
            if d_diagonals_HR is not None:
                add_diagonals(d_diagonals_HR, d_scores, block, reach)
        of_tensors = tensor_gradients(rules, reach, tensors, d_diagonals_HR, ctx.needs_input_grad[6:])
        return dq_THK, dk_TGK.to(k_TGK.dtype), dv_TGK.to(v_TGK.dtype), None, None, None, *of_tensors


def _block_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    block: Block,
    rules: AttentionRules,
) -> Tensor:
    """[H, rows, K] from [H, rows, K] and [G, keys, K]."""
    if rules.softcap is None and rules.dropout is None and not block.has_blind_rows(rules.causal, rules.window):
        if bias is not None:
            bias = bias.to(q.dtype)
            mask = (bias if mask is None else bias.masked_fill(~mask, -torch.inf)).unsqueeze(0)
        grouped = q.shape[0] != k.shape[0]
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, mask, scale=rules.scale, enable_gqa=grouped)[0]
    dtype = torch.promote_types(q.dtype, torch.float32)
    weights, _ = _weights(q.to(dtype), k.to(dtype), mask, bias, block, rules)
    flat = weights.flatten(1, 2)
    dropped = _dropped(block, rules, q.shape[0], weights)
    if dropped is not None:
        flat *= dropped.view(flat.shape)
    return (flat @ v.to(dtype)).view(q.shape).to(q.dtype)


def _dropped(block: Block, rules: AttentionRules, heads: int, like: Tensor) -> Tensor | None:
    """Factors of the weights [H, rows, keys], the same however the queries were cut into blocks."""
    if rules.dropout is None:
        return None
    places = range(block.q_start, block.q_stop), range(block.k_start, block.k_stop)
    return rules.dropout.factors(heads, *places, like)


def _weights(
    q: Tensor, k: Tensor, mask: Tensor | None, bias: Tensor | None, block: Block, rules: AttentionRules
) -> tuple[Tensor, Tensor | None]:
    """Softmax weights [G, H/G, rows, keys] and, with a cap, the cap's derivative of the same shape."""
    groups = k.shape[0]
    grouped = (groups, q.shape[0] // groups, block.rows, block.keys)
    scores = (_by_group(q, groups) @ k.transpose(1, 2)).mul_(rules.scale).view(grouped)
    slope = None
    if rules.softcap is not None:
        scores = scores.div_(rules.softcap).tanh_()
        slope = 1 - scores.square()
        scores.mul_(rules.softcap)
    if bias is not None:
        scores += bias.view(grouped)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    if mask is not None and block.has_blind_rows(rules.causal, rules.window):
        weights.masked_fill_(~mask.any(dim=-1, keepdim=True), 0.0)
    return weights, slope


def _block_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    weights: Tensor,
    slope: Tensor | None,
    dropped: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q [H, rows, K], of k and v [G, keys, K], and of the biased scores [H, rows, keys]."""
    groups = k.shape[0]
    flat = weights.flatten(1, 2)
    grad_rows = _by_group(grad, groups)
    d_scores = grad_rows @ v.transpose(1, 2)
    if dropped is None:
        dv = flat.transpose(1, 2) @ grad_rows
    else:
        dropped = dropped.view(flat.shape)
        dv = (flat * dropped).transpose(1, 2) @ grad_rows
        d_scores *= dropped
    d_scores -= (flat * d_scores).sum(dim=-1, keepdim=True)
    d_scores *= flat
    d_product = d_scores if slope is None else d_scores * slope.flatten(1, 2)
    dq = (d_product @ k).mul_(scale).view(q.shape)
    dk = (d_product.transpose(1, 2) @ _by_group(q, groups)).mul_(scale)
    return dq, dk, dv, d_scores.view(q.shape[0], -1, k.shape[1])


def _by_group(x_HSK: Tensor, groups: int) -> Tensor:
    """[G, H/G * rows, K]: the heads that share keys become rows of one product."""
    return x_HSK.reshape(groups, -1, x_HSK.shape[-1])
