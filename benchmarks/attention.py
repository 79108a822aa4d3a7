"""Attention on packed documents against a dense mask, and how its peak memory grows with the sequence.

Time: forward and backward in fp32, 8 heads of 64, 2,048 tokens in documents of 64 to 448, `auto` against
SDPA under one dense document mask. Memory: the peak of the resident set above the inputs, each length in
a fresh process; packed documents, one document of the whole length, and one with a trained bias, a window
or a cap. The exponent is that of the steepest of them between the first and the last length.
"""

from __future__ import annotations

import math
import subprocess
import sys
from functools import partial

import torch

from benchmarks.machine import forget_peak, memory_kib
from benchmarks.result import Result, interleave, median, median_ratio, timed
from pretrain.model.attention import RelativeBias, attend
from pretrain.model.positions import RelativePositionBias
from pretrain.sequence import SeqInfo

WIDTH, TOKENS = 64, 2048
KINDS = ("packed", "whole", "bias", "window", "softcap")


def documents(tokens: int) -> list[int]:
    """Lengths of 64 to 448, mean 256, that fill `tokens` exactly."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 448:
        lengths.append(min(int(torch.randint(64, 449, (1,), generator=generator)), left))
    return [*lengths, left]


def _inputs(tokens: int, heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(tokens, heads, WIDTH, generator=generator).requires_grad_() for _ in range(3)]


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: str, backend: str) -> None:
    tokens, heads = q.shape[:2]
    info = SeqInfo.from_lengths(documents(tokens) if kind == "packed" else [tokens])
    bias: RelativeBias | None = None
    if kind == "bias":
        table = RelativePositionBias(heads, bidirectional=False)
        torch.nn.init.normal_(table.weight, generator=torch.Generator().manual_seed(0))
        bias = table.rule(tokens, q.device)
    out = attend(
        q, k, v, q_info=info, causal=True, scale=WIDTH**-0.5, bias=bias, backend=backend,
        window=512 if kind == "window" else None, softcap=30.0 if kind == "softcap" else None,
    )  # fmt: skip
    for x in (q, k, v):
        x.grad = None
    out.sum().backward()


def peak_megabytes(kind: str, backend: str, tokens: int) -> float:
    """Peak memory of one forward and backward pass in this process, in MB."""
    _run(*_inputs(64, 2), kind, backend)  # libraries and their scratch
    q, k, v = _inputs(tokens, 2)
    forget_peak()  # the peak starts anew, without that of the imports
    before = memory_kib("VmRSS")
    _run(q, k, v, kind, backend)
    return (memory_kib("VmHWM") - before) * 1024 / 1e6


def _peak_in_own_process(kind: str, backend: str, tokens: int) -> float:
    command = [sys.executable, "-m", "benchmarks.attention", kind, backend, str(tokens)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def growth(kind: str, backend: str, lengths: tuple[int, int]) -> float:
    """The exponent p of peak ~ length^p between two lengths."""
    short, long = (_peak_in_own_process(kind, backend, tokens) for tokens in lengths)
    return math.log(long / short) / math.log(lengths[1] / lengths[0])


def measure(*, quick: bool, command: str) -> list[Result]:
    """Speed over a dense mask, and the steepest growth of peak memory beside the reference's."""
    repetitions = 3 if quick else 7
    q, k, v = _inputs(TOKENS, 8)
    sides = {name: partial(_run, q, k, v, "packed", backend) for name, backend in (("ours", "auto"), ("mask", "sdpa"))}
    for action in sides.values():
        action()
    times = interleave({name: partial(timed, action) for name, action in sides.items()}, repetitions)
    # Below 4,096 tokens the blocks of queries still grow themselves, up to their bound.
    steepest = max(growth(kind, "auto", (4096, 16384)) for kind in (KINDS[:2] if quick else KINDS))
    return [
        Result(
            "attention.packed_vs_mask",
            median_ratio(times["mask"], times["ours"]),
            "ratio",
            "dense mask, s",
            median(times["mask"]),
            repetitions,
            command,
        ),
        Result(
            "attention.peak_memory_growth",
            steepest,
            "exponent",
            "reference",
            growth("whole", "reference", (1024, 4096)),
            1,
            command,
        ),
    ]


if __name__ == "__main__":
    print(peak_megabytes(sys.argv[1], sys.argv[2], int(sys.argv[3])))
