"""What the processor of this machine has instructions for."""

from __future__ import annotations

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
