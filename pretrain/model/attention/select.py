"""Which backend computes: the first of the preferred ones that can, or the one that was named, or an error.

Takes the requested name and the need of a call -> a choice with its reason. PURE but for the look at the
device's capability and at installed packages.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from pretrain.config.schema import AnyModelConfig
from pretrain.errors import UserError
from pretrain.model.attention import flash, flex, varlen
from pretrain.model.attention.flash import attend_flash
from pretrain.model.attention.flex import attend_flex
from pretrain.model.attention.need import Need
from pretrain.model.attention.padding import Backend
from pretrain.model.attention.qblock import attend_qblock
from pretrain.model.attention.reference import attend_reference
from pretrain.model.attention.sdpa import attend_sdpa
from pretrain.model.attention.split import attend_split
from pretrain.model.attention.varlen import attend_varlen

BACKENDS: dict[str, Backend] = {
    "varlen": attend_varlen,
    "varlen_fa2": functools.partial(attend_varlen, kernel="FA2"),
    "varlen_fa3": functools.partial(attend_varlen, kernel="FA3"),
    "varlen_fa4": functools.partial(attend_varlen, kernel="FA4"),
    "flash": attend_flash,
    "split": attend_split,
    "flex": attend_flex,
    "qblock": attend_qblock,
    "sdpa": attend_sdpa,
    "reference": attend_reference,
}

# What `auto` tries, in this order, and the reason to take it. `qblock` can do everything.
_PREFERRED = {
    "varlen": "one FlashAttention kernel for all documents",
    "flash": "a FlashAttention package, which caps scores",
    "split": "whole documents, one fused kernel call each",
    "flex": "one compiled kernel with cap, bias and window",
    "qblock": "blocks of queries for a window, a cap, a bias or dropout of weights",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend that runs, and why, for the log."""

    backend: str
    why: str

    def __str__(self) -> str:
        return f"{self.backend} ({self.why})"


def backend_names() -> list[str]:
    return list(BACKENDS)


_DROPS_EXACTLY = ("qblock", "reference")


def refusal(name: str, need: Need) -> str | None:
    """Why a backend cannot do what is needed, as the rest of a sentence; None where it can."""
    if need.dropout and name not in _DROPS_EXACTLY:
        return (
            "its kernels draw the dropout of attention weights from the device's generator, not from (seed, step, "
            "micro-batch)"
        )
    if name.startswith("varlen"):
        kernels: dict[str, varlen.Kernel] = {"varlen_fa2": "FA2", "varlen_fa3": "FA3", "varlen_fa4": "FA4"}
        return varlen.refusal(need, kernels.get(name))
    if name == "flash":
        return flash.refusal(need)
    if name == "flex":
        return flex.refusal(need)
    if name == "split" and (need.window or need.softcap or need.bias):
        asked = [word for word in ("window", "softcap", "bias") if getattr(need, word)]
        return f"it computes whole documents only, without {' and '.join(asked)}"
    if name == "sdpa" and need.softcap:
        return "no SDPA kernel caps scores (softcap)"
    return None


@functools.lru_cache(maxsize=256)
def choose_backend(requested: str, need: Need) -> Choice:
    """The backend that runs and why; `auto` decides, a name is taken at its word.

    Raises:
        UserError: an unknown name, or a backend that cannot do what is needed.
    """
    if requested == "auto":
        return next(Choice(name, why) for name, why in _PREFERRED.items() if refusal(name, need) is None)
    if requested not in BACKENDS:
        raise UserError(
            f"model.attention={requested} is unknown. Backends are auto, {', '.join(BACKENDS)}. Set one of them."
        )
    if reason := refusal(requested, need):
        able = [name for name in _PREFERRED if refusal(name, need) is None]
        raise UserError(
            f"model.attention={requested} cannot run here: {reason}. A named backend is never replaced silently. "
            f"Set model.attention=auto, or one of {', '.join(able)}."
        )
    return Choice(requested, "as model.attention says")


def explain_attention(model: AnyModelConfig, device: torch.device, precision: Literal["bf16", "fp32"]) -> Choice:
    """What the self-attention of a model will run on, before it runs: for the log, and to refuse early.

    Raises:
        UserError: as `choose_backend`.
    """
    need = Need(
        device=device.type,
        dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
        head_width=model.width_per_head,
        window=getattr(model, "window", None) is not None,
        softcap=getattr(model, "attention_softcap", None) is not None,
        bias=getattr(model, "num_buckets", None) is not None or getattr(model, "positions", "") == "alibi",
        dropout=model.attention_dropout > 0.0,
    )
    return choose_backend(model.attention, need)
