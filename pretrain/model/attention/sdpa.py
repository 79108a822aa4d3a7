"""Attention on torch's scaled_dot_product_attention alone, forward and backward.

What its kernels do without a mask runs on whole documents, as `split` does it; windows and biases run by
blocks of queries, each under the mask of its own rows and keys, and the backward pass calls the kernel again
with gradients on. So no mask of T x T exists. Beside `qblock`, whose backward pass is written out, it is the
slower and independent way to the same numbers. Source: own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pretrain.model.attention.blocked import BlockKernel, Gradients, attend_blocks
from pretrain.model.attention.blocks import Block
from pretrain.model.attention.pieces import reach_of
from pretrain.model.attention.rules import AttentionRules
from pretrain.model.attention.split import attend_split, sdpa
from pretrain.sequence import SeqInfo


def attend_sdpa(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, q_info: SeqInfo, k_info: SeqInfo, rules: AttentionRules
) -> Tensor:
    """Whole documents, or blocks of queries where a window or a bias needs a mask."""
    if rules.bias is None and (rules.window is None or rules.window >= reach_of(q_info, k_info)):
        return attend_split(q_THK, k_TGK, v_TGK, q_info, k_info, rules)
    return attend_blocks(BlockKernel(_attend, _gradients), q_THK, k_TGK, v_TGK, q_info, k_info, rules)


def attend_block(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, rules: AttentionRules) -> Tensor:
    """torch's kernel on one block, [H, rows, K]; what is added takes the dtype of the queries."""
    mask = None if added is None else added.to(q.dtype).unsqueeze(0)
    return sdpa(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), rules.scale, mask=mask)[0]


def _attend(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, block: Block, rules: AttentionRules) -> Tensor:
    del block
    return attend_block(q, k, v, added, rules)


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
    del block
    biases = () if added is None or rules.bias is None else (added,)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *biases)]
    with torch.enable_grad():
        out = attend_block(leaves[0], leaves[1], leaves[2], leaves[3] if biases else added, rules)
    *found, d_added = (*torch.autograd.grad(out, leaves, grad), None)[:4]
    for place, gradient in zip(into, found, strict=True):
        place.add_(gradient)
    return d_added
