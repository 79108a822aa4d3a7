"""Peak resident memory of every backend that runs on the CPU, in a process per length, up to 16,384 tokens.

Heads are small, so that scores and masks are nearly all there is: a matrix of one byte a pair would take 268 MB,
queries take 1 MB. `python -m benchmarks attention` measures heads of 64.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.attention import ABLE, growth
from pretrain.model.attention.need import Need
from pretrain.model.attention.select import BACKENDS, refusal

CASES = [(kind, backend) for backend, kinds in ABLE.items() for kind in kinds]
QUICK = [
    case for case in CASES if case[1] == "split" or case[0] in ("packed", "window")
]  # the others take seconds each


def too_steep(cases: list[tuple[str, str]]) -> dict[tuple[str, str], float]:
    """Cases whose memory grows faster than the length to the power of 1.1, if any."""
    exponents, dense = growth(cases, heads=1, width=16)
    assert dense > 1.4  # measured from 1,024 tokens on, where some scratch is still large beside it
    return {case: p for case, p in zip(cases, exponents, strict=True) if p > 1.1}


def test_memory_grows_with_the_tokens_and_not_with_their_pairs() -> None:
    assert too_steep(QUICK) == {}


@pytest.mark.slow
def test_no_backend_but_the_reference_holds_a_matrix_of_all_pairs() -> None:
    assert too_steep(CASES) == {}


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_of_the_cpu_is_measured_with_all_that_it_computes(name: str) -> None:
    rules = {kind: {kind: True} if kind in ("bias", "window", "softcap") else {} for kind, _ in CASES}
    able = [kind for kind, need in rules.items() if refusal(name, Need("cpu", torch.float32, 16, **need)) is None]
    assert sorted(ABLE.get(name, ())) == ([] if name == "reference" else sorted(able))
