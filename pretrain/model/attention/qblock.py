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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    added: Tensor | None,
    grad: Tensor,
    into: Gradients,
    block: Block,
    rules: AttentionRules,
) -> Tensor | None:
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v, grad = (x.to(dtype) for x in (q, k, v, grad))
    weights, slope = _weights(q, k, added, block, rules)
    dropped = _dropped(block, rules, q.shape[0], weights)
    return _block_backward(q, k, v, grad, into, weights, slope, dropped, rules)


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
    rows, columns = _by_group(q, groups), k.transpose(1, 2)
    slope = None
    if added is not None and rules.softcap is None and groups == q.shape[0]:
        scores = torch.baddbmm(added, rows, columns, alpha=rules.scale).view(grouped)
    else:
        scores = torch.bmm(rows, columns).mul_(rules.scale).view(grouped)
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
    into: Gradients,
    weights: Tensor,
    slope: Tensor | None,
    dropped: Tensor | None,
    rules: AttentionRules,
) -> Tensor | None:
    """Adds the gradients of q [H, rows, K], of k and v [G, keys, K]; gives that of a bias [H, rows, keys]."""
    groups = k.shape[0]
    flat = weights.flatten(1, 2)
    grad_rows = _by_group(grad, groups)
    d_weights = torch.bmm(grad_rows, v.transpose(1, 2))
    seen = flat
    if dropped is not None:
        dropped = dropped.view(flat.shape)
        seen = flat * dropped
        d_weights *= dropped
    d_scores = torch.ops.aten._softmax_backward_data(d_weights, flat, -1, flat.dtype)
    d_product = d_scores if slope is None else d_scores * slope.flatten(1, 2)
    dq, dk, dv = into
    _add_product(dq, d_product, k, rules.scale)
    _add_product(dk, d_product.transpose(1, 2), _by_group(q, groups), rules.scale)
    _add_product(dv, seen.transpose(1, 2), grad_rows, 1.0)
    return None if rules.bias is None else d_scores.view(q.shape[0], -1, k.shape[1])


def _add_product(into: Tensor, left: Tensor, right: Tensor, factor: float) -> None:
    """Adds left @ right * factor, in one call unless heads share keys or the sum has fewer bits than the product."""
    if into.dtype == left.dtype and len(into) == len(left):
        into.baddbmm_(left, right, alpha=factor)
    else:
        into.add_(torch.bmm(left, right).mul_(factor).view(into.shape))


def _by_group(x_HSK: Tensor, groups: int) -> Tensor:
    """[G, H/G * rows, K]: the heads that share keys become rows of one product."""
    return x_HSK.reshape(groups, -1, x_HSK.shape[-1])
