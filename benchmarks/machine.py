"""What this machine computes fast, so that a benchmark ends within minutes on any.

bf16 is measured where the processor has instructions for it. Elsewhere torch emulates it (20 times
slower than fp32 here), so that both sides of a comparison run in fp32 and the baseline's name says so.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import torch

from pretrain.processor import computes_bf16

# A process that is started with it gives large blocks back when they are freed. By default glibc keeps some, and
# how many differs by run: 20 to 80 MB here, so that its peak would say little of the code.
NOTHING_KEPT = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}


def precision() -> Literal["bf16", "fp32"]:
    """What both sides of a training benchmark compute in."""
    return "bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() and computes_bf16() else "fp32"


def dtype() -> torch.dtype:
    return torch.bfloat16 if precision() == "bf16" else torch.float32


def memory_kib(field: str) -> int:
    """A memory figure of this process: VmRSS (resident now) or VmHWM (its peak)."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {field}. Memory is measured on Linux only.")
    return int(found[1])


def forget_peak() -> None:
    """Lets VmHWM start anew at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
