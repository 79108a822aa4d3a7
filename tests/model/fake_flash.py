"""Stand-ins for the CUDA kernels, of their documented semantics: they refuse what the kernels refuse.

Each computes document by document in float64 from cu_seqlens, windows counted as (left, right) around the
own place with the ends of documents aligned, -1 (or None in FlashAttention 4) without limit.
"""

from __future__ import annotations

import torch


def fake_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError("Expect query and key/value to have the same number of heads")
    return _attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, 0.0)


def fake_flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    del deterministic
    left, right = (-1 if side is None else side for side in window_size)
    if causal:
        right = 0
    bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out = _attend(q, k, v, *bounds, softmax_scale, (left, right), softcap)
    return out, torch.zeros(q.shape[1], q.shape[0])


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    window: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if cu_q.dtype != torch.int32 or cu_k.dtype != torch.int32:
        raise RuntimeError("cu_seqlens must have dtype int32")
    if cu_q[-1] != q.shape[0] or cu_k[-1] != k.shape[0]:
        raise RuntimeError("tensors longer than cu_seqlens[-1]: gradients would be NaN")
    if max_q < cu_q.diff().max() or max_k < cu_k.diff().max() or min(cu_q.diff().min(), cu_k.diff().min()) < 1:
        raise RuntimeError("a document is empty or longer than said")
    assert scale is not None
    group = q.shape[1] // k.shape[1]
    parts = []
    for n in range(cu_q.shape[0] - 1):
        own_q = q[cu_q[n] : cu_q[n + 1]].double()
        own_k, own_v = (x[cu_k[n] : cu_k[n + 1]].double().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhk,shk->hqs", own_q, own_k) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        place = torch.arange(own_q.shape[0])[:, None] + own_k.shape[0] - own_q.shape[0]
        key = torch.arange(own_k.shape[0])[None, :]
        hidden = torch.zeros(place.shape[0], key.shape[1], dtype=torch.bool)
        if window[0] >= 0:
            hidden |= key < place - window[0]
        if window[1] >= 0:
            hidden |= key > place + window[1]
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
        parts.append(torch.einsum("hqs,shk->qhk", weights, own_v))
    return torch.cat(parts).to(q.dtype)
