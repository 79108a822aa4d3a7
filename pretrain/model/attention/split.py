"""Attention document by document: no mask, no padding, cost = sum of squared document lengths.

Equal bit for bit to running each document alone, and blind to what stands in the others (also NaN).
On CPU 6 times faster than a dense mask at 2 k tokens, 21 times at 8 k. Memory grows with T: torch's fused
kernels keep no scores. A kernel call never has a mask together with is_causal (backends disagree about
that), and never is_causal with unequal lengths (it would be aligned at the wrong end). Source: own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pretrain.model.attention.rules import AttentionRules
from pretrain.sequence import SeqInfo

FEW_QUERIES = 64  # behind a cache: their mask costs a byte per query and key, and is smaller than what it hides


def attend_split(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, q_info: SeqInfo, k_info: SeqInfo, rules: AttentionRules
) -> Tensor:
    """One kernel call per document, or a single batched one when all lengths are equal; causal or not, no more."""
    if _equal_lengths(q_info) and _equal_lengths(k_info):
        q, k, v = (x.unflatten(0, (len(q_info.lengths), -1)).transpose(1, 2) for x in (q_THK, k_TGK, v_TGK))
        return _attend_batch(q, k, v, rules).transpose(1, 2).flatten(0, 1)
    # split, not slices: its backward is one concatenation, a slice's a zero tensor of full size per document.
    documents = zip(q_THK.split(q_info.lengths), k_TGK.split(k_info.lengths), v_TGK.split(k_info.lengths), strict=True)
    return torch.cat([_one(q, k, v, rules) for q, k, v in documents])


def _one(q_SHK: Tensor, k_SGK: Tensor, v_SGK: Tensor, rules: AttentionRules) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_SHK, k_SGK, v_SGK))
    return _attend_batch(q, k, v, rules).squeeze(0).transpose(0, 1)


def _equal_lengths(info: SeqInfo) -> bool:
    return info.lengths.count(info.lengths[0]) == len(info.lengths)


def _attend_batch(q_NHSK: Tensor, k_NGSK: Tensor, v_NGSK: Tensor, rules: AttentionRules) -> Tensor:
    """N documents of one query length and one key length, [N, H, S_q, K]; ends aligned."""
    queries, keys = q_NHSK.shape[2], k_NGSK.shape[2]
    if not rules.causal or queries == 1:
        return sdpa(q_NHSK, k_NGSK, v_NGSK, rules.scale)
    if queries > keys:  # the first ones see nothing
        blind, seeing = q_NHSK.split([queries - keys, keys], dim=2)
        out = sdpa(seeing, k_NGSK, v_NGSK, rules.scale, is_causal=True)
        return torch.cat([torch.zeros_like(blind), out], dim=2)
    if queries == keys:
        return sdpa(q_NHSK, k_NGSK, v_NGSK, rules.scale, is_causal=True)
    if queries <= FEW_QUERIES:
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)[None, :]
        return sdpa(q_NHSK, k_NGSK, v_NGSK, rules.scale, mask=rules.allowed(distance).to(q_NHSK.device))
    # Queries of nothing before them make both sides equal: a mask of queries x keys would be kept for the backward
    # pass, and where queries are half of the keys its kernel takes as long as this one.
    widened = functional.pad(q_NHSK, (0, 0, keys - queries, 0))
    return sdpa(widened, k_NGSK, v_NGSK, rules.scale, is_causal=True)[:, :, keys - queries :]


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """torch's kernel on [N, H, S_q, K] and [N, G, S_k, K], heads grouped natively."""
    grouped = q.shape[1] != k.shape[1]
    return functional.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped)
