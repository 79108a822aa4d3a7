"""Fused linear cross-entropy against the plain one: logits of all targets, then `F.cross_entropy`.

Forward and backward of head and loss: width 384, a vocabulary of 32,768; 2,048 targets for the time, 4,096 for
the memory. Memory is the peak of the resident set above what was resident before, each side in a process of
its own that has computed a small loss before, so that loaded libraries and the scratch of their kernels are
counted on neither side.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.machine import NOTHING_KEPT, dtype, forget_peak, memory_kib, precision
from benchmarks.result import Result, interleave, median, median_ratio, timed
from pretrain.config.schema import LossConfig
from pretrain.loss.fused import LossOptions, fused_linear_cross_entropy

WIDTH, VOCABULARY = 384, 32768
TIMED_TARGETS, HELD_TARGETS = 2048, 4096


def _sides(targets: int, vocabulary: int = VOCABULARY) -> dict[str, Callable[[], None]]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(targets, WIDTH, generator=generator).to(dtype()).requires_grad_()
    weight = (torch.randn(vocabulary, WIDTH, generator=generator) * 0.02).to(dtype()).requires_grad_()
    labels = torch.randint(vocabulary, (targets,), generator=generator)
    options = LossOptions(chunk_rows=LossConfig().chunk_rows)

    def fused() -> None:
        hidden.grad = weight.grad = None
        fused_linear_cross_entropy(hidden, weight, labels, options).objective.backward()

    def plain() -> None:
        hidden.grad = weight.grad = None
        F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum").backward()

    return {"fused": fused, "plain": plain}


def _peak_megabytes(side: str) -> float:
    """Peak memory of one side, in this process, in MB."""
    _sides(targets=256, vocabulary=1024)[side]()
    action = _sides(HELD_TARGETS)[side]
    forget_peak()
    before = memory_kib("VmRSS")
    action()
    # Not getrusage: its maximum outlives exec and would be the parent's.
    return (memory_kib("VmHWM") - before) * 1024 / 1e6


def _peak_in_own_process(side: str) -> float:
    command = [sys.executable, "-m", "benchmarks.loss", side]
    environment = os.environ | NOTHING_KEPT
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def measure(*, quick: bool, command: str) -> list[Result]:
    """Ratios of time and of peak memory, ours over plain."""
    repetitions = 1 if quick else 5
    sides = _sides(TIMED_TARGETS)
    for action in sides.values():
        action()
    times = interleave({name: partial(timed, action) for name, action in sides.items()}, repetitions)
    peaks = interleave(
        {name: partial(_peak_in_own_process, name) for name in sides}, 1
    )  # it never varies by more than 1 %
    ratios = {"time": (times, "s"), "memory": (peaks, "MB")}
    return [
        Result(
            f"loss.{what}_vs_plain",
            median_ratio(values["fused"], values["plain"]),
            "ratio",
            f"plain in {precision()}, {unit}",
            median(values["plain"]),
            len(values["plain"]),
            command,
        )
        for what, (values, unit) in ratios.items()
    ]


if __name__ == "__main__":
    print(_peak_megabytes(sys.argv[1]))
