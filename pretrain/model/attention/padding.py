"""Padding costs nothing: the last document of a padded layout is left out and its outputs are 0.

Exact, because nobody reads the outputs of padding: its labels are ignored and no other document sees
it. Without this, the tail of a short micro-batch is one long document, quadratic in its length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pretrain.model.attention.rules import AttentionRules
from pretrain.sequence import SeqInfo

Backend = Callable[[Tensor, Tensor, Tensor, SeqInfo, SeqInfo, AttentionRules], Tensor]


def attend_without_padding(
    backend: Backend,
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    q_info: SeqInfo,
    k_info: SeqInfo,
    rules: AttentionRules,
) -> Tensor:
    """The backend's output for the real documents, then zeros; gradients likewise."""
    if len(q_info.lengths) == 1:
        bias = () if rules.bias is None else rules.bias.tensors
        return _Nothing.apply(q_THK, k_TGK, v_TGK, *bias)
    # split, not slices: its backward is one concatenation.
    q, q_tail = q_THK.split([q_info.num_tokens - q_info.lengths[-1], q_info.lengths[-1]])
    k, v = (x.split([x.shape[0] - k_info.lengths[-1], k_info.lengths[-1]])[0] for x in (k_TGK, v_TGK))
    out = backend(q, k, v, q_info.without_last(), k_info.without_last(), rules)
    return torch.cat([out, torch.zeros(q_tail.shape, dtype=out.dtype, device=out.device)])


class _Nothing(torch.autograd.Function):
    """Zeros that stay in the graph: every parameter gets its (zero) gradient, which ZeRO's collectives wait for."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return torch.zeros(inputs[0].shape, dtype=inputs[0].dtype, device=inputs[0].device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        del grad
        return tuple(torch.zeros_like(x) for x in ctx.saved_tensors)
