"""Attention by blocks of queries against the keys that they can see: windows, caps, biases, long documents.

Computes the weights of each block again for the backward pass (`blocked`), so memory grows with T and
never with T^2. Like `split` it is blind to other documents, also to NaN in them. Forward runs on the fused kernel
of torch where that can do it; scores and sums are at least fp32. Source: own; the gradient of attention as in
Dao et al. 2022, appendix B.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pretrain.model.attention.blocked import BlockKernel, Gradients, attend_blocks
from pretrain.model.attention.blocks import Block
from pretrain.model.attention.rules import AttentionRules
from pretrain.model.attention.sdpa import attend_block
from pretrain.sequence import SeqInfo


def attend_qblock(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, q_info: SeqInfo, k_info: SeqInfo, rules: AttentionRules
) -> Tensor:
    """Any rules, any device and dtype; first derivatives only."""
    return attend_blocks(BlockKernel(_attend, _gradients), q_THK, k_TGK, v_TGK, q_info, k_info, rules)


def _attend(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, block: Block, rules: AttentionRules) -> Tensor:
    if rules.softcap is None and rules.dropout is None and not block.has_blind_rows(rules.causal, rules.window):
        return attend_block(q, k, v, added, rules)
    dtype = torch.promote_types(q.dtype, torch.float32)
    weights, _ = _weights(q.to(dtype), k.to(dtype), added, block, rules)
    flat = weights.flatten(1, 2)
    dropped = _dropped(block, rules, q.shape[0], weights)
    if dropped is not None:
        flat *= dropped.view(flat.shape)
    return (flat @ v.to(dtype)).view(q.shape).to(q.dtype)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, grad: Tensor, block: Block, rules: AttentionRules
) -> Gradients:
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v, grad = (x.to(dtype) for x in (q, k, v, grad))
    weights, slope = _weights(q, k, added, block, rules)
    dropped = _dropped(block, rules, q.shape[0], weights)
    return _block_backward(q, k, v, grad, weights, slope, dropped, rules)


def _dropped(block: Block, rules: AttentionRules, heads: int, like: Tensor) -> Tensor | None:
    """Factors of the weights [H, rows, keys], the same however the queries were cut into blocks."""
    if rules.dropout is None:
        return None
    places = range(block.q_start, block.q_stop), range(block.k_start, block.k_stop)
    return rules.dropout.factors(heads, *places, like)


def _weights(
    q: Tensor, k: Tensor, added: Tensor | None, block: Block, rules: AttentionRules
) -> tuple[Tensor, Tensor | None]:
    """Softmax weights [G, H/G, rows, keys] and, with a cap, the cap's derivative of the same shape."""
    groups = k.shape[0]
    grouped = (groups, q.shape[0] // groups, block.rows, block.keys)
    scores = torch.bmm(_by_group(q, groups), k.transpose(1, 2)).mul_(rules.scale).view(grouped)
    slope = None
    if rules.softcap is not None:
        scores = scores.div_(rules.softcap).tanh_()
        slope = 1 - scores.square()
        scores.mul_(rules.softcap)
    if added is not None:
        scores += added.unflatten(0, grouped[:2] if added.shape[0] > 1 else (1, 1))
    weights = torch.softmax(scores, dim=-1)
    if added is not None and block.has_blind_rows(rules.causal, rules.window):
        weights.masked_fill_(added[0].isneginf().all(dim=-1, keepdim=True), 0.0)
    return weights, slope


def _block_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    weights: Tensor,
    slope: Tensor | None,
    dropped: Tensor | None,
    rules: AttentionRules,
) -> Gradients:
    """Gradients of q [H, rows, K], of k and v [G, keys, K], and of a bias [H, rows, keys]."""
    groups = k.shape[0]
    flat = weights.flatten(1, 2)
    grad_rows = _by_group(grad, groups)
    d_weights = torch.bmm(grad_rows, v.transpose(1, 2))
    if dropped is None:
        dv = torch.bmm(flat.transpose(1, 2), grad_rows)
    else:
        dropped = dropped.view(flat.shape)
        dv = torch.bmm((flat * dropped).transpose(1, 2), grad_rows)
        d_weights *= dropped
    d_scores = torch.ops.aten._softmax_backward_data(d_weights, flat, -1, flat.dtype)
    d_product = d_scores if slope is None else d_scores * slope.flatten(1, 2)
    dq = torch.bmm(d_product, k).mul_(rules.scale).view(q.shape)
    dk = torch.bmm(d_product.transpose(1, 2), _by_group(q, groups)).mul_(rules.scale)
    return dq, dk, dv, None if rules.bias is None else d_scores.view(q.shape[0], -1, k.shape[1])


def _by_group(x_HSK: Tensor, groups: int) -> Tensor:
    """[G, H/G * rows, K]: the heads that share keys become rows of one product."""
    return x_HSK.reshape(groups, -1, x_HSK.shape[-1])
