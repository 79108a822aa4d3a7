"""Peak FLOP/s of one rank, the denominator of MFU: configured, looked up (CUDA) or measured (CPU).

The CPU number is the best rate of a short square matrix product in the run's dtype with the rank's
threads: what this machine's BLAS reaches, not a data sheet's. Ranks measure at the same moment, as
they train; other work on the machine makes the number lower and MFU higher than the truth.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
import time
from collections.abc import Callable
from typing import Literal

import torch

from pretrain.errors import StoreError
from pretrain.store import Store

PEAK_KEY = "metrics/peak.json"

# Dense bf16 FLOP/s without sparsity, by words of the device's name; vendor data sheets.
_CUDA_PEAK_BF16 = (
    ("B200", 2.25e15),
    ("B100", 1.75e15),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("GH200", 989e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A40", 149.7e12),
    ("A10", 125e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
)


def peak_flops_per_rank(
    configured: float | None, device: torch.device, precision: Literal["bf16", "fp32"]
) -> float | None:
    """FLOP/s that one rank could reach at best; None when nobody knows (an unlisted GPU, fp32 on CUDA).

    Args:
        configured: `metrics.peak_flops_per_rank`; wins when given.
    """
    if configured is not None:
        return configured
    if device.type == "cpu":
        return measure_cpu_peak(torch.bfloat16 if precision == "bf16" else torch.float32)
    if device.type == "cuda" and precision == "bf16":
        return cuda_peak_bf16(torch.cuda.get_device_name(device))
    return None


def remembered_peak(store: Store, device: torch.device, measure: Callable[[], float | None]) -> float | None:
    """What `measure` gave on this host with this many threads before in this run; measured and kept if it did not.

    Measuring takes 0.4 s, which a restart should not pay, and a run's MFU has one denominator. Only a CPU's is kept.
    """
    if device.type != "cpu":
        return measure()
    here = {"host": socket.gethostname(), "threads": torch.get_num_threads()}
    with contextlib.suppress(StoreError, ValueError, TypeError, KeyError):
        kept = json.loads(store.get(PEAK_KEY))
        if {name: kept[name] for name in here} == here and math.isfinite(kept["flops"]) and kept["flops"] > 0:
            return float(kept["flops"])
    flops = measure()
    if flops is not None:
        with contextlib.suppress(StoreError):  # it is measured again, at worst
            store.put(PEAK_KEY, json.dumps({**here, "flops": flops}).encode())
    return flops


def cuda_peak_bf16(name: str) -> float | None:
    """Data-sheet bf16 FLOP/s of a CUDA device by its name; None when it is not in the table."""
    return next((peak for part, peak in _CUDA_PEAK_BF16 if re.search(rf"\b{part}\b", name)), None)


def measure_cpu_peak(dtype: torch.dtype, *, size: int = 768, budget_s: float = 0.4) -> float:
    """Best FLOP/s of a `size`^3 matrix product with this process's threads, within about `budget_s` seconds."""
    generator = torch.Generator().manual_seed(0)  # own generator: measuring must not move the run's randomness
    left = torch.rand(size, size, generator=generator).to(dtype)
    right = torch.rand(size, size, generator=generator).to(dtype)
    out = torch.empty(size, size, dtype=dtype)
    best_s = float("inf")
    deadline = time.perf_counter() + budget_s
    with torch.no_grad():
        torch.mm(left, right, out=out)  # allocates workspaces and wakes the threads
        while True:
            start = time.perf_counter()
            torch.mm(left, right, out=out)
            end = time.perf_counter()
            best_s = min(best_s, end - start)
            if end >= deadline:
                return 2.0 * size**3 / best_s
