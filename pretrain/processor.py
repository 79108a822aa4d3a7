"""What the processor of this machine has instructions for."""

from __future__ import annotations

import os
from pathlib import Path

_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86, x86, Arm


def computes_bf16() -> bool:
    """Whether matrix products in bf16 are instructions; elsewhere torch emulates them, twenty times slower than fp32.

    True where nothing is known (no /proc/cpuinfo).
    """
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return True
    return bool(_BF16_FLAGS & set(words))


def use_large_pages() -> None:
    """Asks torch to take large tensors from pages of 2 MiB where the kernel has them. To be called before its import.

    With pages of 4 KiB a copy of gigabytes waits for their addresses. A user's own setting stays.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
