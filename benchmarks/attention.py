"""Attention on packed documents against a dense mask, and how the peak memory of each CPU backend grows.

Time: forward and backward in fp32, 8 heads of 64, 2,048 tokens in documents of 64 to 448, `auto` against
torch's SDPA under one dense document mask, on the layout [heads, T, K] that it likes best. Memory: the peak of
the resident set above the inputs, each length in a process of its own, for every backend and all it can do:
packed documents, one document of the whole length, one whose first half sees itself in both directions, and
one with a trained bias, a window or a cap. The exponent is that of the steepest between 4,096 and 16,384.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from functools import partial
from typing import NoReturn

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.machine import NOTHING_KEPT, forget_peak, memory_kib
from benchmarks.result import Result, interleave, median, median_ratio, timed
from pretrain.data.batch import seq_info
from pretrain.model.attention import RelativeBias, attend
from pretrain.model.positions import RelativePositionBias
from pretrain.sequence import SeqInfo

WIDTH, TOKENS = 64, 2048
KINDS = ("packed", "whole", "prefix", "bias", "window", "softcap")
# What each backend of the CPU computes; the first is what `auto` takes for the first three, the second for the others.
ABLE = {"split": KINDS[:3], "qblock": KINDS, "sdpa": KINDS[:5]}
# Below 4,096 tokens the blocks of queries still grow themselves, up to their bound.
LENGTHS, DENSE_LENGTHS = (4096, 16384), (1024, 4096)


def documents(tokens: int) -> list[int]:
    """Lengths of 64 to 448, mean 256, that fill `tokens` exactly."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 448:
        lengths.append(min(int(torch.randint(64, 449, (1,), generator=generator)), left))
    return [*lengths, left]


def _inputs(tokens: int, heads: int, width: int = WIDTH) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(tokens, heads, width, generator=generator).requires_grad_() for _ in range(3)]


def _layout(tokens: int, kind: str) -> SeqInfo:
    if kind == "prefix":
        return seq_info(np.array([tokens]), prefixes=np.array([tokens // 2]))
    return SeqInfo.from_lengths(documents(tokens) if kind == "packed" else [tokens])


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: str, backend: str) -> None:
    tokens, heads, width = q.shape
    bias: RelativeBias | None = None
    if kind == "bias":
        table = RelativePositionBias(heads, bidirectional=False)
        torch.nn.init.normal_(table.weight, generator=torch.Generator().manual_seed(0))
        bias = table.rule(tokens, q.device)
    out = attend(
        q, k, v, q_info=_layout(tokens, kind), causal=True, scale=width**-0.5, bias=bias, backend=backend,
        window=512 if kind == "window" else None, softcap=30.0 if kind == "softcap" else None,
    )  # fmt: skip
    _backward(out, q, k, v)


def _run_masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """The same packed documents under one mask [T, T], made for each call as a model would for each batch."""
    lengths = torch.tensor(documents(q.shape[0]))
    document = torch.repeat_interleave(lengths)
    mask = (document[:, None] == document[None, :]).tril_()
    heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    _backward(F.scaled_dot_product_attention(*heads_first, mask, scale=WIDTH**-0.5), q, k, v)


def _backward(out: torch.Tensor, *leaves: torch.Tensor) -> None:
    for x in leaves:
        x.grad = None
    out.sum().backward()


def _peak_megabytes(kind: str, backend: str, tokens: int, heads: int, width: int) -> float:
    """Peak memory of one forward and backward pass in this process, in MB."""
    _run(*_inputs(64, heads, width), kind, backend)  # libraries and their scratch
    q, k, v = _inputs(tokens, heads, width)
    forget_peak()  # the peak starts anew, without that of the imports
    before = memory_kib("VmRSS")
    _run(q, k, v, kind, backend)
    return (memory_kib("VmHWM") - before) * 1024 / 1e6


def peaks(cases: list[tuple[str, str, int]], *, heads: int, width: int) -> list[float]:
    """Peak memory in MB of each (kind, backend, tokens), each in a process of its own that has computed nothing yet."""
    command = [sys.executable, "-m", "benchmarks.attention", json.dumps(cases), str(heads), str(width)]
    environment = os.environ | NOTHING_KEPT
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found: list[float] = json.loads(done.stdout)
    return found


def growth(cases: list[tuple[str, str]], *, heads: int, width: int) -> tuple[list[float], float]:
    """The exponents p of peak ~ length^p for each (kind, backend), and that of `reference`, which holds all pairs."""
    runs = [(*case, tokens) for case in cases for tokens in LENGTHS]
    megabytes = peaks([*runs, *(("whole", "reference", tokens) for tokens in DENSE_LENGTHS)], heads=heads, width=width)
    pairs = zip(megabytes[::2], megabytes[1::2], strict=True)
    *exponents, dense = [math.log(long / short, LENGTHS[1] / LENGTHS[0]) for short, long in pairs]
    return exponents, dense


def measure(*, quick: bool, command: str) -> list[Result]:
    """Speed over a dense mask; of each CPU backend, the steepest growth of peak memory, beside the reference's."""
    repetitions = 3 if quick else 7
    q, k, v = _inputs(TOKENS, 8)
    sides = {"ours": partial(_run, q, k, v, "packed", "auto"), "mask": partial(_run_masked, q, k, v)}
    for action in sides.values():
        action()
    times = interleave({name: partial(timed, action) for name, action in sides.items()}, repetitions)
    shape = {"heads": 1, "width": 16} if quick else {"heads": 2, "width": WIDTH}
    cases = [(kind, backend) for backend, kinds in ABLE.items() for kind in kinds]
    found, dense = growth(cases, **shape)
    exponents = dict(zip(cases, found, strict=True))
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
        *(
            Result(f"attention.{name}", exponent, "exponent", "dense, in reference", dense, 1, command)
            for name, exponent in [
                ("peak_memory_growth", max(exponents.values())),
                *((f"peak_memory_growth.{backend}.{kind}", exponents[kind, backend]) for kind, backend in cases),
            ]
        ),
    ]


def _forked_peak(kind: str, backend: str, tokens: int, heads: int, width: int) -> float:
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        _answer(writer, kind, backend, tokens, heads, width)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"attention={backend} on {tokens} tokens ({kind}) ended with {status}")
    return float(text)


def _answer(writer: int, *case: str | int) -> NoReturn:
    try:
        os.write(writer, str(_peak_megabytes(*case)).encode())  # type: ignore[arg-type]
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    # Forks of a process that has only imported: a start costs no imports, and no case sees another's memory.
    print(json.dumps([_forked_peak(*case, *map(int, sys.argv[2:])) for case in json.loads(sys.argv[1])]))
