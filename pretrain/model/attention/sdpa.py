"""Attention through torch's scaled_dot_product_attention: a batch of equal documents, or one dense mask.

`attend_batch` is the kernel call that `split` shares. It never passes a mask together with is_causal
(backends disagree about that) and never is_causal with unequal lengths (aligned at the wrong end).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pretrain.model.attention.reference import packed_distance, softmax_attention
from pretrain.model.attention.rules import AttentionRules
from pretrain.sequence import SeqInfo


def attend_batch(q_NHSK: Tensor, k_NGSK: Tensor, v_NGSK: Tensor, rules: AttentionRules) -> Tensor:
    """N documents of one query length and one key length, [N, H, S_q, K]."""
    q_length, k_length = q_NHSK.shape[2], k_NGSK.shape[2]
    windowed = rules.window is not None and rules.window < max(q_length, k_length)
    aligned_causal = rules.causal and q_length == k_length
    one_query_sees_all = rules.causal and q_length == 1
    plain = not windowed and rules.bias is None and rules.softcap is None
    if plain and (aligned_causal or one_query_sees_all or not rules.causal):
        is_causal = aligned_causal and not one_query_sees_all
        return _sdpa(q_NHSK, k_NGSK, v_NGSK, rules.scale, is_causal=is_causal)
    q_place = torch.arange(k_length - q_length, k_length, device=q_NHSK.device)
    distance = q_place[:, None] - torch.arange(k_length, device=q_NHSK.device)[None, :]
    return _attend_masked(q_NHSK, k_NGSK, v_NGSK, rules.allowed(distance), distance, rules)


def attend_sdpa(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, q_info: SeqInfo, k_info: SeqInfo, rules: AttentionRules
) -> Tensor:
    """Equal documents as a batch; others under one dense [T_q, T_k] mask (quadratic in T)."""
    if equal_lengths(q_info) and equal_lengths(k_info):
        return attend_equal(q_THK, k_TGK, v_TGK, len(q_info.lengths), rules)
    same_document, distance = packed_distance(q_info, k_info, q_THK.device)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_THK, k_TGK, v_TGK))
    out = _attend_masked(q, k, v, same_document & rules.allowed(distance), distance, rules)
    return out.squeeze(0).transpose(0, 1)


def attend_equal(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, num_documents: int, rules: AttentionRules) -> Tensor:
    """One batched call for documents that all have the same length."""
    q, k, v = (x.unflatten(0, (num_documents, -1)).transpose(1, 2) for x in (q_THK, k_TGK, v_TGK))
    return attend_batch(q, k, v, rules).transpose(1, 2).flatten(0, 1)


def equal_lengths(info: SeqInfo) -> bool:
    return info.lengths.count(info.lengths[0]) == len(info.lengths)


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, distance: Tensor, rules: AttentionRules) -> Tensor:
    if rules.softcap is not None:  # no SDPA kernel caps scores
        return softmax_attention(q, k, v, allowed, distance, rules)
    if rules.bias is None:
        return _sdpa(q, k, v, rules.scale, mask=allowed)
    bias = rules.bias(-distance).masked_fill(~allowed, -torch.inf)
    return _sdpa(q, k, v, rules.scale, mask=bias.to(q.dtype))


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return functional.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped)
