"""Attention by blocks of queries, each against the keys that it can see, as one autograd function.

A backend says what one block does, forward and backward. Only q, k and v are kept for the backward pass, and gradients
of keys are summed in place, so that memory grows with T and never with T^2. Shared by `qblock` and `sdpa`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pretrain.model.attention.blocks import Block, plan_blocks
from pretrain.model.attention.pieces import AddedScores, reach_of
from pretrain.model.attention.rules import AttentionRules
from pretrain.sequence import SeqInfo

Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]


class BlockKernel(NamedTuple):
    """What a backend does with q [H, rows, K], k and v [G, keys, K] of one block and what is added to its scores.

    That is [H, rows, keys] with a bias, [1, rows, keys] with a mask only, at least fp32, or None.

    Attributes:
        forward: (q, k, v, added, block, rules) -> [H, rows, K].
        backward: (q, k, v, added, gradient of the result, those of q, k and v, block, rules): adds to the three, the
            first in the dtype of q and the others in fp32 at least; gives that of what was added where there is a bias.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None, Block, AttentionRules], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor, Gradients, Block, AttentionRules], Tensor | None]


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
    """Short documents wait for each call of torch, so views are taken all at once and products are added in place."""

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
        q_sides, k_sides = _views(blocks, (q_THK, out_THK), (k_TGK, v_TGK))
        for block, (q, out), (k, v) in zip(blocks, q_sides, k_sides, strict=True):
            out.copy_(kernel.forward(q, k, v, added.of(block), block, rules))
        return out_THK

    @staticmethod
    def backward(ctx: Any, grad_THK: Tensor) -> tuple[Tensor | None, ...]:
        q_THK, k_TGK, v_TGK, *tensors = ctx.saved_tensors
        dtype = _wide(q_THK)
        dq_THK = torch.zeros(q_THK.shape, dtype=q_THK.dtype, device=q_THK.device)
        dk_TGK, dv_TGK = (torch.zeros(k_TGK.shape, dtype=dtype, device=q_THK.device) for _ in range(2))
        added = AddedScores(ctx.blocks, ctx.rules, ctx.reach, tensors, q_THK.device, dtype)
        q_sides, k_sides = _views(ctx.blocks, (q_THK, grad_THK, dq_THK), (k_TGK, v_TGK, dk_TGK, dv_TGK))
        for block, (q, grad, dq), (k, v, dk, dv) in zip(ctx.blocks, q_sides, k_sides, strict=True):
            d_added = ctx.kernel.backward(q, k, v, added.of(block), grad, (dq, dk, dv), block, ctx.rules)
            if d_added is not None:
                added.add_gradient(block, d_added)
        of_tensors = added.gradients(tensors, ctx.needs_input_grad[7:])
        return dq_THK, dk_TGK.to(k_TGK.dtype), dv_TGK.to(v_TGK.dtype), None, None, None, None, *of_tensors


def _views(
    blocks: Sequence[Block], q_sides: Sequence[Tensor], k_sides: Sequence[Tensor]
) -> tuple[Iterator[tuple[Tensor, ...]], Iterator[tuple[Tensor, ...]]]:
    """The rows of each block, heads first, [H, rows, K] of the one and [G, keys, K] of the other side's tensors."""
    rows, keys = [(x.q_start, x.q_stop) for x in blocks], [(x.k_start, x.k_stop) for x in blocks]
    return zip(*(_cut(x, rows) for x in q_sides), strict=True), zip(*(_cut(x, keys) for x in k_sides), strict=True)


def _cut(x_THK: Tensor, spans: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
    """Views of spans with heads first: one call where they lie end to end, as whole documents do."""
    x_HTK = x_THK.transpose(0, 1)
    ends = [0, *(stop for _, stop in spans)]
    if any(start != end for (start, _), end in zip(spans, ends, strict=False)):
        return [x_HTK[:, start:stop] for start, stop in spans]
    return x_HTK.split([*(stop - start for start, stop in spans), len(x_THK) - ends[-1]], dim=1)[:-1]


def _wide(x: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)
