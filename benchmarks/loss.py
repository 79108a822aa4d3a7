"""Fused linear cross-entropy against the plain one: logits of all targets, then `F.cross_entropy`.

Forward and backward of head and loss in bf16: 4,096 targets, width 384, a vocabulary of 32,768.
Memory is the peak of the resident set above what was resident before, each side in a process of its own.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.result import Result, interleave, median, median_ratio, timed
from pretrain.loss.fused import LossOptions, fused_linear_cross_entropy

TARGETS, WIDTH, VOCABULARY = 4096, 384, 32768


def _sides() -> dict[str, Callable[[], None]]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TARGETS, WIDTH, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(VOCABULARY, WIDTH, generator=generator) * 0.02).bfloat16().requires_grad_()
    labels = torch.randint(VOCABULARY, (TARGETS,), generator=generator)

    def fused() -> None:
        hidden.grad = weight.grad = None
        fused_linear_cross_entropy(hidden, weight, labels, LossOptions()).objective.backward()

    def plain() -> None:
        hidden.grad = weight.grad = None
        F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum").backward()

    return {"fused": fused, "plain": plain}


def _peak_megabytes(side: str) -> float:
    """Peak memory of one side, in this process, in MB."""
    action = _sides()[side]
    before = _memory_kib("VmRSS")
    action()
    # Not getrusage: its maximum outlives exec and would be the parent's.
    return (_memory_kib("VmHWM") - before) * 1024 / 1e6


def _memory_kib(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {field}. Memory is measured on Linux only.")
    return int(found[1])


def _peak_in_own_process(side: str) -> float:
    command = [sys.executable, "-m", "benchmarks.loss", side]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(*, quick: bool, command: str) -> list[Result]:
    """Ratios of time and of peak memory, ours over plain."""
    repetitions = 3 if quick else 7
    sides = _sides()
    for action in sides.values():
        action()
    times = interleave({name: partial(timed, action) for name, action in sides.items()}, repetitions)
    peaks = interleave({name: partial(_peak_in_own_process, name) for name in sides}, 1 if quick else 3)
    return [
        Result(
            "loss.time_vs_plain",
            median_ratio(times["fused"], times["plain"]),
            "ratio",
            "plain, s",
            median(times["plain"]),
            repetitions,
            command,
        ),
        Result(
            "loss.memory_vs_plain",
            median_ratio(peaks["fused"], peaks["plain"]),
            "ratio",
            "plain, MB",
            median(peaks["plain"]),
            len(peaks["plain"]),
            command,
        ),
    ]


if __name__ == "__main__":
    print(_peak_megabytes(sys.argv[1]))
