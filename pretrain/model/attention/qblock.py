"""Attention by blocks of queries against the keys that they can see: windows, caps, biases, long documents.

Keeps only q, k and v for the backward pass and computes the weights of each block again, so memory
grows with T and never with T^2; gradients of keys are summed in place. Short documents are computed as a
batch. Like `split` it is blind to other documents, also to NaN in them. Forward runs on the fused kernel of
torch where that can do it; scores and sums are at least fp32. Source: own; the gradient of attention as in
Dao et al. 2022, appendix B.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pretrain.model.attention.pieces import Piece, bias_diagonals, cut, reach_of, tensor_gradients
from pretrain.model.attention.rules import AttentionRules
from pretrain.sequence import SeqInfo


def attend_qblock(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, q_info: SeqInfo, k_info: SeqInfo, rules: AttentionRules
) -> Tensor:
    """Any rules, any device and dtype; first derivatives only."""
    pieces = cut(q_info, k_info, rules, q_THK.shape[1], q_THK.device)
    tensors = () if rules.bias is None else rules.bias.tensors
    return _BlockedAttention.apply(q_THK, k_TGK, v_TGK, pieces, rules, reach_of(q_info, k_info), *tensors)


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGK: Tensor,
        pieces: Sequence[Piece],
        rules: AttentionRules,
        reach: int,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(q_THK, k_TGK, v_TGK, *tensors)
        ctx.pieces, ctx.rules, ctx.reach = pieces, rules, reach
        out_THK = torch.zeros(q_THK.shape, dtype=q_THK.dtype, device=q_THK.device)
        diagonals_HR = bias_diagonals(rules, reach, q_THK.device, tensors)
        for piece in pieces:
            q, k, v = piece.queries(q_THK), piece.keys(k_TGK), piece.keys(v_TGK)
            bias = None if diagonals_HR is None else piece.bias(diagonals_HR, reach)
            piece.put_queries(out_THK, _forward(q, k, v, bias, piece, rules))
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
        for piece in ctx.pieces:
            q, grad = (piece.queries(x).to(dtype) for x in (q_THK, grad_THK))
            k, v = (piece.keys(x).to(dtype) for x in (k_TGK, v_TGK))
            bias = None if diagonals_HR is None else piece.bias(diagonals_HR, reach)
            weights, slope = _weights(q, k, bias, piece, rules)
            dropped = piece.dropped(q.shape[0], weights)
            dq, dk, dv, d_scores = _backward(q, k, v, grad, weights, slope, dropped, rules.scale)
            piece.put_queries(dq_THK, dq)
            piece.add_keys(dk_TGK, dk)
            piece.add_keys(dv_TGK, dv)
            if d_diagonals_HR is not None:
                piece.add_bias(d_diagonals_HR, d_scores, reach)
        of_tensors = tensor_gradients(rules, reach, tensors, d_diagonals_HR, ctx.needs_input_grad[6:])
        return dq_THK, dk_TGK.to(k_TGK.dtype), dv_TGK.to(v_TGK.dtype), None, None, None, *of_tensors


def _forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, piece: Piece, rules: AttentionRules) -> Tensor:
    """[H, rows, K] from [H, rows, K] and [G, keys, K]."""
    if rules.softcap is None and rules.dropout is None and not piece.has_blind_rows:
        mask = piece.mask(q.shape[0], q.device)
        if bias is not None:
            mask = (bias if mask is None else bias.masked_fill(~mask, -torch.inf)).to(q.dtype)
        if mask is not None and mask.dim() == 3:
            mask = mask.unsqueeze(0)
        grouped = q.shape[0] != k.shape[0]
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, mask, scale=rules.scale, enable_gqa=grouped)[0]
    dtype = torch.promote_types(q.dtype, torch.float32)
    weights, _ = _weights(q.to(dtype), k.to(dtype), bias, piece, rules)
    flat = weights.flatten(1, 2)
    dropped = piece.dropped(q.shape[0], weights)
    if dropped is not None:
        flat *= dropped.view(flat.shape)
    return (flat @ v.to(dtype)).view(q.shape).to(q.dtype)


def _weights(
    q: Tensor, k: Tensor, bias: Tensor | None, piece: Piece, rules: AttentionRules
) -> tuple[Tensor, Tensor | None]:
    """Softmax weights [G, H/G, rows, keys] and, with a cap, the cap's derivative of the same shape."""
    groups = k.shape[0]
    grouped = (groups, q.shape[0] // groups, q.shape[1], k.shape[1])
    scores = (_by_group(q, groups) @ k.transpose(1, 2)).mul_(rules.scale).view(grouped)
    slope = None
    if rules.softcap is not None:
        scores = scores.div_(rules.softcap).tanh_()
        slope = 1 - scores.square()
        scores.mul_(rules.softcap)
    if bias is not None:
        scores += bias.view(grouped)
    mask = piece.mask(q.shape[0], q.device)
    if mask is not None:
        mask = mask.view(grouped) if mask.dim() == 3 else mask
        scores.masked_fill_(~mask, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    if mask is not None and piece.has_blind_rows:
        weights.masked_fill_(~mask.any(dim=-1, keepdim=True), 0.0)
    return weights, slope


def _backward(
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
