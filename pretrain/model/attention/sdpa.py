"""Attention on torch's scaled_dot_product_attention alone, forward and backward.

What its kernels do without a mask runs on whole documents, as `split` does it; windows and biases run by
the pieces of `qblock`, each under the mask of its own rows and keys, and the backward pass calls the kernel again
with gradients on. So no mask of T x T exists. Beside `qblock`, whose backward pass is written out, it is the
slower and independent way to the same numbers. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pretrain.model.attention.pieces import Piece, bias_diagonals, cut, reach_of, tensor_gradients
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
    pieces = cut(q_info, k_info, rules, q_THK.shape[1], q_THK.device)
    tensors = () if rules.bias is None else rules.bias.tensors
    return _MaskedPieces.apply(q_THK, k_TGK, v_TGK, pieces, rules, reach, *tensors)


class _MaskedPieces(torch.autograd.Function):
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
            piece.put_queries(out_THK, _attend(q, k, v, bias, piece, rules))
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
            leaves = [piece.queries(q_THK), piece.keys(k_TGK), piece.keys(v_TGK)]
            if diagonals_HR is not None:
                leaves.append(piece.bias(diagonals_HR, reach))
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in leaves]
                out = _attend(leaves[0], leaves[1], leaves[2], leaves[3] if leaves[3:] else None, piece, rules)
                dq, dk, dv, *d_bias = torch.autograd.grad(out, leaves, piece.queries(grad_THK))
            piece.put_queries(dq_THK, dq)
            piece.add_keys(dk_TGK, dk)
            piece.add_keys(dv_TGK, dv)
            if d_diagonals_HR is not None:
                piece.add_bias(d_diagonals_HR, d_bias[0], reach)
        of_tensors = tensor_gradients(rules, reach, tensors, d_diagonals_HR, ctx.needs_input_grad[6:])
        return dq_THK, dk_TGK.to(k_TGK.dtype), dv_TGK.to(v_TGK.dtype), None, None, None, *of_tensors


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, piece: Piece, rules: AttentionRules) -> Tensor:
    """[H, rows, K] from [H, rows, K] and [G, keys, K], under the piece's mask and bias."""
    mask = piece.mask(q.shape[0], q.device)
    if bias is not None:
        mask = (bias if mask is None else bias.masked_fill(~mask, -torch.inf)).to(q.dtype)
    if mask is not None and mask.dim() == 3:
        mask = mask.unsqueeze(0)
    return sdpa(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), rules.scale, mask=mask)[0]
