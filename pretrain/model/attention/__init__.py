"""Attention: one function for self- and cross-attention on packed tokens, and its backends.

Takes queries [T_q, H, K], keys and values [T_k, G, K] and the document layouts of both sides (the same
number of documents; query document i sees key document i) -> [T_q, H, K].
Adding a backend: one file and one line of `_BACKENDS`; the conformance test picks it up.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from pretrain.errors import UserError
from pretrain.model.attention.reference import attend_reference
from pretrain.model.attention.rules import AttentionRules, RelativeBias
from pretrain.model.attention.sdpa import attend_sdpa
from pretrain.model.attention.split import attend_split
from pretrain.sequence import SeqInfo

__all__ = ["AttentionRules", "RelativeBias", "attend", "backend_names", "choose_backend"]

_BACKENDS: dict[str, Callable[..., Tensor]] = {
    "split": attend_split,
    "sdpa": attend_sdpa,
    "reference": attend_reference,
}


def backend_names() -> list[str]:
    return list(_BACKENDS)


def choose_backend(requested: str, *, softcap: float | None = None) -> str:
    """The backend that runs (worth a line in the log): `auto` decides, a name is taken at its word.

    Raises:
        UserError: an unknown name, or one that cannot compute these rules.
    """
    if requested == "auto":
        return "split"
    if requested not in _BACKENDS:
        raise UserError(
            f"model.attention={requested} is unknown. Backends are auto, {', '.join(_BACKENDS)}. Set one of them."
        )
    if requested == "sdpa" and softcap is not None:
        raise UserError(
            "model.attention=sdpa cannot cap scores (softcap). No SDPA kernel does. "
            "Set model.attention=auto, split or reference."
        )
    return requested


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
    backend: str = "auto",
) -> Float[Tensor, "Tq H K"]:
    """Attention inside documents. See `AttentionRules` for what the options mean; k_info None is q_info.

    Raises:
        UserError: the named backend does not exist or cannot compute this.
        ValueError: the layouts do not describe the tensors, or heads do not group.
    """
    rules = AttentionRules(causal, scale, window, softcap, bias)
    k_info = q_info if k_info is None else k_info
    if q_THK.shape[0] != q_info.num_tokens or k_TGK.shape[0] != sum(k_info.lengths):
        raise ValueError(
            f"{q_THK.shape[0]} queries and {k_TGK.shape[0]} keys do not match layouts of "
            f"{q_info.num_tokens} and {sum(k_info.lengths)} tokens"
        )
    if len(q_info.lengths) != len(k_info.lengths) or q_THK.shape[1] % k_TGK.shape[1]:
        raise ValueError(
            f"{len(q_info.lengths)} query and {len(k_info.lengths)} key documents, {q_THK.shape[1]} query and "
            f"{k_TGK.shape[1]} key heads: documents must pair up and heads must group"
        )
    return _BACKENDS[choose_backend(backend, softcap=softcap)](q_THK, k_TGK, v_TGK, q_info, k_info, rules)
