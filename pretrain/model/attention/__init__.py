"""Attention: one function for self- and cross-attention on packed tokens, and its backends.

Takes queries [T_q, H, K], keys and values [T_k, G, K] and the document layouts of both sides (the same
number of documents; query document i sees key document i) -> [T_q, H, K].
Adding a backend: one file, its line and its refusal in `select`; the conformance test picks it up.
"""

from __future__ import annotations

import functools

from jaxtyping import Float
from torch import Tensor

from pretrain.model.attention.drop import WeightDropout, weight_dropout
from pretrain.model.attention.need import Need
from pretrain.model.attention.observe import AttentionCall, tell_observer
from pretrain.model.attention.padding import attend_without_padding
from pretrain.model.attention.prefix import attend_with_prefix
from pretrain.model.attention.rules import AttentionRules, RelativeBias
from pretrain.model.attention.select import BACKENDS, Choice, backend_names, choose_backend, explain_attention
from pretrain.sequence import SeqInfo

__all__ = [
    "AttentionRules",
    "Choice",
    "Need",
    "RelativeBias",
    "WeightDropout",
    "attend",
    "backend_names",
    "choose_backend",
    "explain_attention",
    "weight_dropout",
]


def attend(
    q_THK: Float[Tensor, "Tq H K"],
    k_TGK: Float[Tensor, "Tk G K"],
    v_TGK: Float[Tensor, "Tk G K"],
    *,
    q_info: SeqInfo,
    k_info: SeqInfo | None = None,
    causal: bool,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    bias: RelativeBias | None = None,
    dropout: WeightDropout | None = None,
    backend: str = "auto",
) -> Float[Tensor, "Tq H K"]:
    """Attention inside documents. See `AttentionRules` for what the options mean; k_info None is q_info.

    Where q_info says that its last document is padding, its outputs are 0 and cost nothing. Where it says that
    documents begin with a part that sees itself in both directions, causal self-attention does so.

    Raises:
        UserError: the named backend does not exist or cannot compute this.
        ValueError: the layouts do not describe the tensors, heads do not group, or a window is below 1.
    """
    k_info = q_info if k_info is None else k_info
    if causal and q_info.prefix is not None:
        calls = [
            functools.partial(
                attend, scale=scale, window=window, softcap=softcap, bias=bias, dropout=own, backend=backend
            )
            for own in (dropout and dropout.part(0), dropout and dropout.part(1))
        ]
        return attend_with_prefix(calls[0], calls[1], q_THK, k_TGK, v_TGK, q_info, k_info)
    _check(q_THK, k_TGK, q_info, k_info, window)
    rules = AttentionRules(causal, scale, window, softcap, bias, dropout)
    tell_observer(lambda: AttentionCall(q_THK, k_TGK, q_info, k_info, rules))
    name = choose_backend(backend, _need(q_THK, q_info, k_info, rules)).backend
    # flex skips padding by itself and wants a fixed T, but not a plan without a block.
    if q_info.padding and (name != "flex" or len(q_info.lengths) == 1):
        return attend_without_padding(BACKENDS[name], q_THK, k_TGK, v_TGK, q_info, k_info, rules)
    return BACKENDS[name](q_THK, k_TGK, v_TGK, q_info, k_info, rules)


def _check(q_THK: Tensor, k_TGK: Tensor, q_info: SeqInfo, k_info: SeqInfo, window: int | None) -> None:
    if q_THK.shape[0] != q_info.num_tokens or k_TGK.shape[0] != k_info.num_tokens:
        raise ValueError(
            f"{q_THK.shape[0]} queries and {k_TGK.shape[0]} keys do not match layouts of "
            f"{q_info.num_tokens} and {k_info.num_tokens} tokens"
        )
    if len(q_info.lengths) != len(k_info.lengths) or q_THK.shape[1] % k_TGK.shape[1]:
        raise ValueError(
            f"{len(q_info.lengths)} query and {len(k_info.lengths)} key documents, {q_THK.shape[1]} query and "
            f"{k_TGK.shape[1]} key heads: documents must pair up and heads must group"
        )
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} sees nothing; it counts the query's own place and is at least 1")


def _need(q_THK: Tensor, q_info: SeqInfo, k_info: SeqInfo, rules: AttentionRules) -> Need:
    reach = max(q_info.max_length, k_info.max_length)
    return Need(
        device=q_THK.device.type,
        dtype=q_THK.dtype,
        head_width=q_THK.shape[2],
        window=rules.window is not None and rules.window < reach,
        softcap=rules.softcap is not None,
        bias=rules.bias is not None,
        blind_queries=rules.causal
        and q_info is not k_info
        and any(q > k for q, k in zip(q_info.lengths, k_info.lengths, strict=True)),
        dropout=rules.dropout is not None,
    )
