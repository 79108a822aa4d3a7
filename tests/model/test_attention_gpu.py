"""The same definition on real kernels: every backend that the present CUDA device can run."""

from __future__ import annotations

import pytest
import torch

from pretrain.model.attention import Need, attend, backend_names
from pretrain.model.attention.select import refusal
from pretrain.sequence import SeqInfo
from tests.model.attention_cases import SCALE, Case, definition, inputs, relative_error, self_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch's own remarks about its compiler; nothing that a test could act on.
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
]

# Heads of 64; the last document of the fourth is longer than a block of the kernels.
CASES = [
    self_case(9, 1, 20, 13),
    self_case(9, 1, 20, 13, causal=False, groups=4),
    self_case(64, 1, 127, window=16, groups=1),
    self_case(129, 200),
    Case((3, 5), (7, 2), causal=False),
    self_case(9, 1, 20, softcap=5.0, std=2.0),
    self_case(64, 1, 127, biased=True),
    self_case(64, 1, 127, biased=True, softcap=5.0, window=16, causal=False),
]
BOUNDS = {torch.bfloat16: 1e-2, torch.float32: 2e-5}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["auto", *backend_names()])
def test_output_and_gradients_equal_the_float64_definition(backend: str, case: Case, dtype: torch.dtype) -> None:
    windowed = case.window is not None and case.window < max(case.q_lengths)
    need = Need("cuda", dtype, 64, windowed, case.softcap is not None, case.biased)
    if backend != "auto" and (reason := refusal(backend, need)):
        pytest.skip(reason)
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda")
    *values, grad = inputs(case, dtype, 64)
    exact = [x.detach().double().requires_grad_() for x in values]
    right, _ = definition(exact[0], exact[1], exact[2], exact[3], case)
    right.backward(grad.double())
    ours = [x.to(device).requires_grad_() for x in values]
    rules = case.rules(ours[3])
    out = attend(
        ours[0], ours[1], ours[2], q_info=SeqInfo.from_lengths(case.q_lengths, device),
        k_info=SeqInfo.from_lengths(case.k_lengths, device), causal=rules.causal, scale=SCALE, window=rules.window,
        softcap=rules.softcap, bias=rules.bias, backend=backend,
    )  # fmt: skip
    out.backward(grad.to(device))
    assert relative_error(out.cpu(), right) < BOUNDS[dtype]
    for mine, theirs in zip(ours, exact, strict=True):
        if theirs.grad is not None and theirs.grad.norm() > 1e-9:
            assert mine.grad is not None
            assert relative_error(mine.grad.cpu(), theirs.grad) < BOUNDS[dtype]


@pytest.mark.parametrize("backend", ["varlen", "flex", "split", "qblock"])
def test_padding_is_skipped_and_stays_zero(backend: str) -> None:
    if reason := refusal(backend, Need("cuda", torch.bfloat16, 64)):
        pytest.skip(reason)
    device = torch.device("cuda")
    case = self_case(64, 30, 100)
    q, k, v, _, grad = (x.to(device) for x in inputs(case, torch.bfloat16, 64))
    for x in (q, k, v):
        x.requires_grad_()
    out = attend(
        q, k, v, q_info=SeqInfo.from_lengths(case.q_lengths, device, padding=True), causal=True, scale=SCALE,
        backend=backend,
    )  # fmt: skip
    out.backward(grad)
    assert out[94:].eq(0).all()
    assert out[:94].abs().sum() > 0
    assert q.grad is not None
    assert q.grad[94:].eq(0).all()
    assert q.grad.isfinite().all()
