"""Attention over packed documents by the FlashAttention packages themselves: the only kernels with a soft-cap.

Takes whichever fits the device: `flash_attn.cute` (FlashAttention 4) on Blackwell, `flash_attn_interface`
(3) on Hopper, `flash_attn` (2) anywhere from Ampere on. All share the arguments used here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pretrain.model.attention.need import Need, compute_capability, is_installed, refusal_of_flash_kernels
from pretrain.model.attention.rules import AttentionRules
from pretrain.model.attention.varlen import window_size
from pretrain.sequence import SeqInfo

# Module -> majors of the compute capability that it is taken for, best first.
_PACKAGES = {"flash_attn.cute": (10,), "flash_attn_interface": (9,), "flash_attn": (8, 9, 10, 11, 12)}


def package() -> str | None:
    """The module to use on the current CUDA device, or None."""
    major = compute_capability()[0]
    return next((name for name, majors in _PACKAGES.items() if major in majors and is_installed(name)), None)


def refusal(need: Need) -> str | None:
    """Why this backend cannot run, or None."""
    reason = refusal_of_flash_kernels(need)
    if reason is None and package() is None:
        return "no FlashAttention package for this device is installed (flash-attn, flash-attn-4)"
    return reason


def attend_flash(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, q_info: SeqInfo, k_info: SeqInfo, rules: AttentionRules
) -> Tensor:
    """One call for all documents."""
    name = package()
    assert name is not None  # `refusal` was asked
    kernel: Callable[..., Any] = importlib.import_module(name).flash_attn_varlen_func
    left, right = window_size(rules)
    if name == "flash_attn.cute":  # None is no limit there
        window: tuple[int | None, int | None] = (None if left < 0 else left, None if right < 0 else right)
    else:
        window = (left, right)
    found = kernel(
        q_THK,
        k_TGK,
        v_TGK,
        cu_seqlens_q=q_info.cu_seqlens,
        cu_seqlens_k=k_info.cu_seqlens,
        max_seqlen_q=q_info.max_length,
        max_seqlen_k=k_info.max_length,
        softmax_scale=rules.scale,
        causal=rules.causal,
        window_size=window,
        softcap=rules.softcap or 0.0,
        # The backward pass sums in any order unless it is told not to.
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return found[0] if isinstance(found, tuple) else found  # 3 and 4 may add the log-sum-exp
