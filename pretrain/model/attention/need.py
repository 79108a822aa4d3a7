"""What a call of attention asks of a backend, and the words of a backend that cannot give it."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Need:
    """Everything that decides which backends can run.

    Attributes:
        device: "cpu" or "cuda".
        head_width: K.
        window: some document is longer than the window.
        softcap, bias: the rules have one.
        blind_queries: causal, and some document has more queries than keys.
        dropout: of the weights.
    """

    device: str
    dtype: torch.dtype
    head_width: int
    window: bool = False
    softcap: bool = False
    bias: bool = False
    blind_queries: bool = False
    dropout: bool = False


def refusal_of_flash_kernels(need: Need) -> str | None:
    """Why no FlashAttention kernel runs, whoever ships it; None where they may."""
    if need.device != "cuda":
        return f"its kernels need a CUDA device, and the tensors are on {need.device}"
    if need.dtype not in (torch.float16, torch.bfloat16):
        return f"its kernels compute in bf16 and fp16, and the tensors are {str(need.dtype).removeprefix('torch.')}"
    if need.head_width % 8 or need.head_width > 256:
        return f"its kernels take heads of a multiple of 8 up to 256, and these are {need.head_width} wide"
    if compute_capability() < (8, 0):
        return "its kernels need compute capability 8.0 or more"
    if need.bias:
        return "its kernels add no bias"
    if need.blind_queries:
        return "its kernels are wrong for causal documents with more queries than keys"
    return None


@functools.cache
def compute_capability() -> tuple[int, int]:
    """Of the current CUDA device."""
    return torch.cuda.get_device_capability()


@functools.cache
def is_installed(module: str) -> bool:
    """Whether a module could be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False
