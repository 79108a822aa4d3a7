"""Attention over packed documents in one kernel: torch's `varlen_attn`, on FlashAttention 2, 3 or 4.

FlashAttention 2 is built into torch; 3 and 4 come from their packages and are swapped in below torch's
own operator, once per process. `varlen` takes the newest that fits the device and is installed.
Traps: windows are (left, right) counts without the query's own place; causal aligns the ends of a
document; T beyond the last cu_seqlens gives NaN gradients, which `SeqInfo` excludes.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)
from torch.nn.attention.varlen import varlen_attn

from pretrain.model.attention.need import Need, compute_capability, is_installed, refusal_of_flash_kernels
from pretrain.model.attention.rules import AttentionRules
from pretrain.sequence import SeqInfo

Kernel = Literal["FA2", "FA3", "FA4"]
_MODULES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}
_MAJORS = {"FA2": (8, 9, 10, 11, 12), "FA3": (9,), "FA4": (9, 10)}


def newest_kernel() -> Kernel:
    """The newest FlashAttention for the current CUDA device; 3 before 4 on Hopper, for which it was written."""
    major = compute_capability()[0]
    order: tuple[Kernel, ...] = ("FA3", "FA4") if major == 9 else ("FA4",)
    return next((kernel for kernel in order if refusal_of_kernel(kernel) is None), "FA2")


def refusal_of_kernel(kernel: Kernel) -> str | None:
    """Why this FlashAttention cannot be swapped in on the current CUDA device."""
    if compute_capability()[0] not in _MAJORS[kernel]:
        return f"{kernel} does not run on compute capability {'.'.join(map(str, compute_capability()))}"
    module = _MODULES.get(kernel)
    return None if module is None or is_installed(module) else f"{kernel} needs the module {module}, not installed"


def refusal(need: Need, kernel: Kernel | None = None) -> str | None:
    """Why this backend cannot run, or None."""
    reason = refusal_of_flash_kernels(need)
    if reason is None and need.softcap:
        reason = "torch's operator has no soft-cap"
    if reason is None and kernel is not None:
        reason = refusal_of_kernel(kernel)
    return reason


def attend_varlen(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    q_info: SeqInfo,
    k_info: SeqInfo,
    rules: AttentionRules,
    kernel: Kernel | None = None,
) -> Tensor:
    """One call for all documents; `kernel` None is the newest."""
    _swap_in(kernel or newest_kernel())
    out_THK = varlen_attn(
        q_THK,
        k_TGK,
        v_TGK,
        q_info.cu_seqlens,
        k_info.cu_seqlens,
        q_info.max_length,
        k_info.max_length,
        scale=rules.scale,
        window_size=window_size(rules),
        enable_gqa=q_THK.shape[1] != k_TGK.shape[1],
    )
    assert isinstance(out_THK, Tensor)  # a pair only where the log-sum-exp is asked for
    return out_THK


def window_size(rules: AttentionRules) -> tuple[int, int]:
    """Keys to the left and to the right of the own place, -1 for all."""
    reach = -1 if rules.window is None else rules.window - 1
    return reach, 0 if rules.causal else reach


def _swap_in(kernel: Kernel) -> None:
    active = current_flash_attention_impl() or "FA2"
    if kernel == active:
        return
    if kernel == "FA2":
        restore_flash_attention_impl()
    else:
        activate_flash_attention_impl(kernel)
