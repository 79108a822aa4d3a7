"""The fused loss against torch's own cross-entropy on whole logits, in float64."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from benchmarks.machine import NOTHING_KEPT
from pretrain.loss.fused import LossOptions, fused_linear_cross_entropy
from pretrain.sequence import IGNORED_LABEL

ROOT = Path(__file__).resolve().parents[2]

OPTIONS = [
    LossOptions(chunk_rows=1000),
    LossOptions(chunk_rows=7),
    LossOptions(label_smoothing=0.1, chunk_rows=7),
    LossOptions(z_loss=0.01, chunk_rows=1),
    LossOptions(label_smoothing=0.2, z_loss=0.01, chunk_rows=10),
]


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(30, 8, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(50, 8, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, 50, (30,), generator=generator)
    labels[[0, 5, 6, 7, 29]] = IGNORED_LABEL
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, options: LossOptions) -> torch.Tensor:
    logits = hidden @ weight.T
    loss = functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=options.label_smoothing)
    return loss + options.z_loss * torch.logsumexp(logits, dim=1).square()[labels != IGNORED_LABEL].sum()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_value_and_gradients_equal_the_plain_loss(options: LossOptions) -> None:
    hidden, weight, labels = inputs()
    sums = fused_linear_cross_entropy(hidden, weight, labels, options)
    found = torch.autograd.grad(3.0 * sums.objective, (hidden, weight))
    right = plain(hidden, weight, labels, options)
    torch.testing.assert_close(sums.objective, right)
    for ours, theirs in zip(found, torch.autograd.grad(3.0 * right, (hidden, weight)), strict=True):
        torch.testing.assert_close(ours, theirs)
    logits = hidden @ weight.T
    torch.testing.assert_close(sums.nll, functional.cross_entropy(logits, labels, reduction="sum"))
    torch.testing.assert_close(sums.z_loss, torch.logsumexp(logits, 1).square()[labels != IGNORED_LABEL].sum())


def test_label_smoothing_counts_only_real_targets() -> None:
    hidden, weight, labels = inputs()
    kept = labels != IGNORED_LABEL
    options = LossOptions(label_smoothing=0.1, z_loss=0.01, chunk_rows=4)
    padded = fused_linear_cross_entropy(hidden, weight, labels, options)
    alone = fused_linear_cross_entropy(hidden[kept], weight, labels[kept], options)
    for found, right in zip(padded, alone, strict=True):
        torch.testing.assert_close(found, right)


def test_all_labels_ignored_gives_zero_and_zero_gradients() -> None:
    hidden, weight, labels = inputs()
    sums = fused_linear_cross_entropy(hidden, weight, torch.full_like(labels, IGNORED_LABEL), LossOptions(0.1, 0.01, 8))
    sums.objective.backward()
    assert [value.item() for value in sums] == [0.0, 0.0, 0.0]
    assert hidden.grad.abs().sum() == 0
    assert weight.grad.abs().sum() == 0


def test_micro_batches_sum_to_the_whole() -> None:
    hidden, weight, labels = inputs()
    whole = torch.autograd.grad(fused_linear_cross_entropy(hidden, weight, labels, LossOptions()).objective, weight)[0]
    parts = sum(
        torch.autograd.grad(
            fused_linear_cross_entropy(hidden[rows], weight, labels[rows], LossOptions()).objective, weight
        )[0]
        for rows in (slice(0, 11), slice(11, 30))
    )
    torch.testing.assert_close(parts, whole)


def test_bf16_inputs_keep_an_fp32_sum_and_gradients_as_exact_as_plain_ones() -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    sums = fused_linear_cross_entropy(hidden, weight, labels, LossOptions(chunk_rows=7))
    assert sums.objective.dtype == sums.nll.dtype == torch.float32
    found = torch.autograd.grad(sums.objective, (hidden, weight))
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    right = plain(*wide, labels, LossOptions())
    exact = torch.autograd.grad(right, wide)
    naive = torch.autograd.grad(
        functional.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum"), (hidden, weight)
    )
    assert sums.objective.item() == pytest.approx(right.item(), rel=2e-3)
    for ours, theirs, reference in zip(found, naive, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        error, naive_error = ((x.double() - reference).norm() / reference.norm() for x in (ours, theirs))
        assert error <= 2 * naive_error + 1e-4


def test_without_gradients_only_the_sums_are_computed() -> None:
    hidden, weight, labels = inputs()
    with torch.no_grad():
        sums = fused_linear_cross_entropy(hidden, weight, labels, LossOptions(chunk_rows=7))
    assert not sums.objective.requires_grad
    torch.testing.assert_close(sums.objective, plain(hidden, weight, labels, LossOptions()).detach())


def test_the_logits_never_exist_as_a_whole() -> None:
    """Peak memory of forward and backward, each in its own process; whole logits alone are 256 MB in fp32."""
    script = textwrap.dedent("""
        import torch
        from benchmarks.machine import memory_kib
        from pretrain.loss.fused import LossOptions, fused_linear_cross_entropy
        hidden, weight = torch.randn(4096, 16, requires_grad=True), torch.randn(16384, 16, requires_grad=True)
        labels = torch.zeros(4096, dtype=torch.int64)
        def run(count):
            sums = fused_linear_cross_entropy(hidden[:count], weight, labels[:count], LossOptions(chunk_rows=256))
            sums.objective.backward()
        run(256)
        before = memory_kib("VmHWM")
        run(4096)
        print((memory_kib("VmHWM") - before) / 1024)
    """)
    words = [sys.executable, "-c", script]
    environment = os.environ | NOTHING_KEPT
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=True)
    assert 0 < float(done.stdout) < 64


def test_another_chunk_rounds_otherwise_so_a_resume_with_one_is_logged() -> None:
    from pretrain.config.schema import LossConfig

    gradients = []
    for chunk_rows in (30, 4):
        hidden, weight, labels = inputs(torch.float32)
        fused_linear_cross_entropy(hidden, weight, labels, LossOptions(chunk_rows=chunk_rows)).objective.backward()
        gradients.append(weight.grad)
    assert not torch.equal(*gradients)
    assert LossConfig.model_fields["chunk_rows"].json_schema_extra == {"resume": "logged"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 5), (17, 1000), (64, 32768)])
def test_log_softmax_over_its_own_input_gives_the_same_bits(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """What the fused loss relies on, and torch does not promise."""
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype) * 5
    apart = torch.log_softmax(logits, dim=1)
    torch.log_softmax(logits, dim=1, out=logits)
    assert torch.equal(logits, apart)


def test_capped_logits_equal_the_plain_loss_of_capped_logits() -> None:
    hidden, weight, labels = inputs()
    options = LossOptions(label_smoothing=0.1, z_loss=0.01, chunk_rows=7, softcap=1.5)
    sums = fused_linear_cross_entropy(hidden, weight, labels, options)
    found = torch.autograd.grad(sums.objective, (hidden, weight))
    logits = 1.5 * torch.tanh(hidden @ weight.T / 1.5)
    right = functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1)
    right = right + 0.01 * torch.logsumexp(logits, dim=1).square()[labels != IGNORED_LABEL].sum()
    torch.testing.assert_close(sums.objective, right)
    for ours, theirs in zip(found, torch.autograd.grad(right, (hidden, weight)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_second_backward_is_refused() -> None:
    hidden, weight, labels = inputs()
    sums = fused_linear_cross_entropy(hidden, weight, labels, LossOptions())
    sums.objective.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        sums.objective.backward()
