"""Dense attention written from its definition: the judge of the other backends, and the attention maps.

Materialises the score of every pair of tokens, in fp32 or fp64. A query that may see no key gives 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pretrain.model.attention.rules import AttentionRules
from pretrain.sequence import SeqInfo


def packed_distance(q_info: SeqInfo, k_info: SeqInfo, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two [T_q, T_k] tensors: bool, same document; int64, query place - key place (ends of documents aligned)."""
    q_document, q_place = places(q_info, device)
    k_document, k_place = places(k_info, device)
    lag = torch.tensor([k - q for q, k in zip(q_info.lengths, k_info.lengths, strict=True)], device=device)
    distance = (q_place + lag[q_document])[:, None] - k_place[None, :]
    return q_document[:, None] == k_document[None, :], distance


def places(info: SeqInfo, device: torch.device) -> tuple[Tensor, Tensor]:
    """Document number and index inside the document of each token (not `positions`, which a cache moves on)."""
    lengths = torch.tensor(info.lengths, device=device)
    document = torch.repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths
    return document, torch.arange(info.num_tokens, device=device) - starts[document]


def attend_reference(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, q_info: SeqInfo, k_info: SeqInfo, rules: AttentionRules
) -> Tensor:
    """Softmax(scale q k^T, capped and biased, masked) v, one dense matrix per head."""
    same_document, distance = packed_distance(q_info, k_info, q_THK.device)
    q_HTK, k_GTK, v_GTK = (x.transpose(0, 1) for x in (q_THK, k_TGK, v_TGK))
    out_HTK = softmax_attention(q_HTK, k_GTK, v_GTK, same_document & rules.allowed(distance), distance, rules)
    return out_HTK.transpose(0, 1)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, distance: Tensor, rules: AttentionRules
) -> Tensor:
    """The formula itself on [..., H, q, K] and [..., G, k, K], scores at least in fp32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[-3] // k.shape[-3]
    k_wide, v_wide = (x.to(dtype).repeat_interleave(group, dim=-3) for x in (k, v))
    scores = q.to(dtype) @ k_wide.transpose(-1, -2) * rules.scale
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    if rules.bias is not None:
        scores = scores + rules.bias(-distance)
    weights = torch.softmax(scores.masked_fill(~allowed, -torch.inf), dim=-1)
    weights = torch.where(allowed.any(dim=-1, keepdim=True), weights, 0.0)
    if rules.dropout is not None:
        heads, queries, keys = weights.shape
        weights = weights * rules.dropout.factors(heads, range(queries), range(keys), weights)
    return (weights @ v_wide).to(q.dtype)
