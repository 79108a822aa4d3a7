"""Attention through torch's compiled `flex_attention`: caps, biases and windows on CUDA in one kernel.

The rules become two small functions of (query, key) that are compiled into the kernel; blocks of pairs
that no rule allows are skipped, padding included, so T stays fixed and nothing is compiled again. The
plan of blocks is made once per micro-batch and rules, not per layer. Padding must hold finite values.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from pretrain.model.attention.need import Need
from pretrain.model.attention.reference import places
from pretrain.model.attention.rules import AttentionRules
from pretrain.sequence import SeqInfo

_KEPT_PLANS = 8  # (self, cross) x (window, none) of two micro-batches


def refusal(need: Need) -> str | None:
    """Why this backend cannot run, or None."""
    if need.device != "cuda":
        return f"torch compiles its backward pass for CUDA only, and the tensors are on {need.device}"
    if need.dtype == torch.float64:
        return "its kernels have no fp64"
    if need.head_width < 16:
        return f"its kernels take heads of 16 or more, and these are {need.head_width} wide"
    return None


@dataclass(frozen=True, slots=True)
class _Plan:
    """Visible blocks of a pair of layouts.

    Attributes:
        infos: kept, because the plan is found again by their identity.
        row, column: place of each query and key, ends of the documents aligned.
    """

    infos: tuple[SeqInfo, SeqInfo]
    mask: BlockMask
    row: Tensor
    column: Tensor


_plans: OrderedDict[tuple[Any, ...], _Plan] = OrderedDict()


def attend_flex(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, q_info: SeqInfo, k_info: SeqInfo, rules: AttentionRules
) -> Tensor:
    """One kernel for the whole micro-batch."""
    plan = _plan(q_info, k_info, rules, q_THK.device)
    reach = max(q_info.max_length, k_info.max_length)
    diagonals_HR = None if rules.bias is None else rules.bias.diagonals(reach, q_THK.device)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_THK, k_TGK, v_TGK))
    out = _kernel(q_THK.device.type)(
        q,
        k,
        v,
        score_mod=_score_mod(rules, plan, diagonals_HR, reach),
        block_mask=plan.mask,
        scale=rules.scale,
        enable_gqa=q_THK.shape[1] != k_TGK.shape[1],
    )
    return out[0].transpose(0, 1)


@functools.cache
def _kernel(device: str) -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False, fullgraph=True) if device == "cuda" else flex_attention


@functools.cache
def _planner(device: str) -> Callable[..., BlockMask]:
    # Uncompiled it writes down all pairs before it sums them up in blocks.
    return torch.compile(create_block_mask, dynamic=False) if device == "cuda" else create_block_mask


def _plan(q_info: SeqInfo, k_info: SeqInfo, rules: AttentionRules, device: torch.device) -> _Plan:
    key = (id(q_info), id(k_info), rules.causal, rules.window)
    if key in _plans:
        _plans.move_to_end(key)
        return _plans[key]
    q_document, row = places(q_info, device)
    k_document, column = places(k_info, device)
    lag = torch.tensor([k - q for q, k in zip(q_info.lengths, k_info.lengths, strict=True)], device=device)
    row = row + lag[q_document]
    if q_info.padding:  # a document that no key belongs to
        q_document = q_document.masked_fill(q_document == len(q_info.lengths) - 1, -1)

    # A lambda, as below: torch counts the arguments of the function's own code, so it must not be wrapped.
    mask = _planner(device.type)(
        lambda batch, head, query, key: (
            (q_document[query] == k_document[key]) & rules.allowed(row[query] - column[key])
        ),
        None,
        None,
        row.shape[0],
        column.shape[0],
        device=device,
    )
    _plans[key] = _Plan((q_info, k_info), mask, row, column)
    if len(_plans) > _KEPT_PLANS:
        _plans.popitem(last=False)
    return _plans[key]


def _score_mod(
    rules: AttentionRules, plan: _Plan, diagonals_HR: Tensor | None, reach: int
) -> Callable[..., Tensor] | None:
    cap, row, column = rules.softcap, plan.row, plan.column
    if diagonals_HR is None:
        return None if cap is None else lambda score, batch, head, query, key: cap * torch.tanh(score / cap)
    middle = reach - 1

    # Clamped, because scores of pairs in different documents are computed before they are masked, and where sources
    # are longer than targets their distance may be beyond any document's.
    if cap is None:
        return lambda score, batch, head, query, key: (
            score + diagonals_HR[head, (column[key] - row[query] + middle).clamp(0, 2 * middle)]
        )
    return lambda score, batch, head, query, key: (
        cap * torch.tanh(score / cap) + diagonals_HR[head, (column[key] - row[query] + middle).clamp(0, 2 * middle)]
    )
