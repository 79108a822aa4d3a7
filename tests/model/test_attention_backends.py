"""The GPU backends as far as a CPU shows them, and the choice between all of them.

flex: its masks run eagerly here, where torch forbids them only because it compiles no backward for the CPU.
varlen and flash: their call sites against fakes of the kernels' documented semantics.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from pretrain.errors import UserError
from pretrain.model.attention import Need, attend, backend_names, choose_backend, explain_attention
from pretrain.model.attention import flash as flash_backend
from pretrain.model.attention import varlen as varlen_backend
from pretrain.model.attention.flash import attend_flash
from pretrain.model.attention.flex import attend_flex
from pretrain.model.attention.select import BACKENDS
from pretrain.model.attention.varlen import attend_varlen
from pretrain.sequence import SeqInfo
from tests.model.attention_cases import SCALE, Case, errors, inputs, self_case
from tests.model.fake_flash import fake_flash_attn_varlen_func, fake_varlen_attn
from tests.model.small import decoder_config

select = importlib.import_module("pretrain.model.attention.select")
need_module = importlib.import_module("pretrain.model.attention.need")

FLEX = [
    self_case(9, 1, 20, groups=1),
    self_case(9, 4, window=3, causal=False),
    Case((3, 5), (7, 2), causal=False, groups=4),
]
VARLEN = [
    self_case(9, 1, 20, 13),
    self_case(9, 1, 20, 13, causal=False, groups=4),
    self_case(9, 1, 20, window=4, groups=1),
    self_case(9, 1, 20, window=1),
    self_case(9, 20, window=4, causal=False),
    self_case(9, 20, window=20),
    Case((3, 5), (7, 2), causal=False),
    Case((2, 1), (9, 4)),
]
CAPPED = self_case(9, 1, 20, softcap=5.0, window=4, std=2.0)


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_validate_device", lambda query, key, value: None)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.usefixtures("eager_flex")
@pytest.mark.parametrize("case", FLEX, ids=str)
def test_the_rules_of_flex_equal_the_float64_definition(case: Case) -> None:
    for name, error in errors(attend_flex, case, torch.float32, head_width=16).items():
        assert error < 2e-5, name


@pytest.mark.usefixtures("eager_flex")
def test_flex_masks_padding_and_plans_once_per_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    flex_module = sys.modules["pretrain.model.attention.flex"]
    made: list[int] = []
    create = torch_flex.create_block_mask
    monkeypatch.setattr(flex_module, "_planner", lambda device: lambda *a, **k: made.append(1) or create(*a, **k))
    case = self_case(5, 3, 6)
    q, k, v, _, _ = inputs(case, torch.float32, 16)
    info = SeqInfo.from_lengths(case.q_lengths, padding=True)
    outs = [attend_flex(q, k, v, info, info, case.rules(torch.zeros(4))) for _ in range(3)]
    assert len(made) == 1
    assert outs[0][8:].eq(0).all()
    real = SeqInfo.from_lengths([5, 3])
    right = attend(q[:8], k[:8], v[:8], q_info=real, causal=True, scale=SCALE)
    torch.testing.assert_close(outs[0][:8], right, rtol=1e-5, atol=1e-5)


_FLEX_WITHOUT_HOOK = """
import torch
from torch.nn.attention import flex_attention as torch_flex
torch_flex._validate_device = lambda query, key, value: None
from pretrain.model.attention import flex
from tests.model.attention_cases import Case, errors, self_case
compiled = torch.compile(torch_flex.flex_attention, backend="aot_eager", fullgraph=True, dynamic=False)
flex._kernel = lambda device: compiled
attend_flex = flex.attend_flex
cases = [
    self_case(9, 1, 20, biased=True), self_case(9, 1, 20, softcap=5.0, std=2.0),
    self_case(9, 4, window=3, causal=False, biased=True, softcap=5.0, groups=4),
    Case((3, 5), (7, 2), causal=False, biased=True),
]
for case in cases:
    for name, error in errors(attend_flex, case, torch.float32, head_width=16).items():
        assert error < 2e-5, (case, name, error)
    print(case.biased, case.softcap, len(errors(attend_flex, case, torch.float32, head_width=16)))
"""


def test_the_score_rules_of_flex_equal_the_float64_definition_in_a_process_without_the_type_hook() -> None:
    """A bias with its gradient and a soft-cap. torch traces these functions, and the hook would be traced with them."""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PRETRAIN_NO_TYPE_HOOK": "1", "PYTHONPATH": str(root)}
    result = subprocess.run(
        [sys.executable, "-c", _FLEX_WITHOUT_HOOK],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.split("\n")[:-1] == ["True None 5", "False 5.0 4", "True 5.0 5", "True None 5"]


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of compute capability 8.0 that only the choice sees."""
    for module in (need_module, varlen_backend, flash_backend):
        monkeypatch.setattr(module, "compute_capability", lambda: (8, 0))
    select.choose_backend.cache_clear()


@pytest.fixture
def fake_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention packages of all generations that hold the fake."""
    for name in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
        module = types.ModuleType(name)
        module.flash_attn_varlen_func = fake_flash_attn_varlen_func  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    for module in (varlen_backend, flash_backend):
        monkeypatch.setattr(module, "is_installed", lambda name: True)


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize("case", VARLEN, ids=str)
def test_varlen_passes_its_kernel_what_the_kernel_documents(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_backend, "varlen_attn", fake_varlen_attn)
    for name, error in errors(attend_varlen, case, torch.bfloat16).items():
        assert error < 1e-2, name


@pytest.mark.usefixtures("fake_packages")
@pytest.mark.parametrize("major", [8, 9, 10])
@pytest.mark.parametrize("case", [*VARLEN, CAPPED], ids=str)
def test_flash_passes_its_kernel_what_the_kernel_documents(
    case: Case, major: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_backend, "compute_capability", lambda: (major, 0))
    assert flash_backend.package() == {8: "flash_attn", 9: "flash_attn_interface", 10: "flash_attn.cute"}[major]
    for name, error in errors(attend_flash, case, torch.float16).items():
        assert error < 2e-3, name


@pytest.mark.usefixtures("fake_packages")
@pytest.mark.parametrize(
    ("major", "newest", "refused"), [(8, "FA2", ("FA3", "FA4")), (9, "FA3", ()), (10, "FA4", ("FA3",))]
)
def test_the_newest_flash_attention_of_the_device_is_swapped_in_once(
    major: int, newest: str, refused: tuple[varlen_backend.Kernel, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    active: list[str] = []
    monkeypatch.setattr(varlen_backend, "compute_capability", lambda: (major, 0))
    monkeypatch.setattr(varlen_backend, "current_flash_attention_impl", lambda: active[-1] if active else None)
    monkeypatch.setattr(varlen_backend, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(varlen_backend, "restore_flash_attention_impl", active.clear)
    monkeypatch.setattr(varlen_backend, "varlen_attn", fake_varlen_attn)
    assert varlen_backend.newest_kernel() == newest
    for kernel in refused:
        assert kernel in (varlen_backend.refusal_of_kernel(kernel) or "")
    case = self_case(3, 2)
    q, k, v, _, _ = inputs(case, torch.bfloat16)
    info = SeqInfo.from_lengths([3, 2])
    for _ in range(2):
        attend_varlen(q, k, v, info, info, case.rules(torch.zeros(4)))
    assert active == ([] if newest == "FA2" else [newest])
    attend_varlen(q, k, v, info, info, case.rules(torch.zeros(4)), kernel="FA2")
    assert active == []


@pytest.mark.usefixtures("fake_packages")
@pytest.mark.parametrize(
    ("name", "kernel", "major"), [("varlen_fa2", "FA2", 8), ("varlen_fa3", "FA3", 9), ("varlen_fa4", "FA4", 10)]
)
def test_a_flash_attention_that_is_named_is_the_one_that_computes(
    name: str, kernel: str, major: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    active, used = ["FA4" if kernel == "FA2" else "FA2"], []  # another one ran before
    for module in (need_module, varlen_backend):
        monkeypatch.setattr(module, "compute_capability", lambda: (major, 0))
    monkeypatch.setattr(varlen_backend, "current_flash_attention_impl", lambda: active[-1])
    monkeypatch.setattr(varlen_backend, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(varlen_backend, "restore_flash_attention_impl", lambda: active.append("FA2"))

    def spy(*args: Any, **options: Any) -> torch.Tensor:
        used.append(active[-1])
        return fake_varlen_attn(*args, **options)

    monkeypatch.setattr(varlen_backend, "varlen_attn", spy)
    assert select.refusal(name, cuda()) is None
    for case in VARLEN:
        for what, error in errors(BACKENDS[name], case, torch.bfloat16).items():
            assert error < 1e-2, (case, what)
    assert set(used) == {kernel}


GPU = {
    "varlen": (attend_varlen, torch.bfloat16),
    "flash": (attend_flash, torch.float16),
    "flex": (attend_flex, torch.float32),
}


@pytest.mark.usefixtures("ampere", "fake_packages", "eager_flex")
@pytest.mark.parametrize("backend", GPU)
@pytest.mark.parametrize("window", [None, 4])
def test_gpu_backends_keep_documents_apart_and_follow_their_order(
    backend: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen_backend, "varlen_attn", fake_varlen_attn)
    run, dtype = GPU[backend]
    case = self_case(9, 1, 20, 13, window=window)
    q, k, v, _, grad = inputs(case, dtype, 16)
    rules = case.rules(torch.zeros(4))
    info, moved = SeqInfo.from_lengths((9, 1, 20, 13)), SeqInfo.from_lengths((13, 9, 1, 20))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = run(*leaves, info, info, rules)
    # A gradient into the third document reaches no other; other documents' keys and values do not reach it.
    only = torch.zeros_like(grad)
    only[10:30] = grad[10:30]
    for leaf, found in zip(leaves, torch.autograd.grad(out, leaves, only), strict=True):
        assert found[10:30].abs().sum() > 0
        assert found[:10].eq(0).all(), leaf.shape
        assert found[30:].eq(0).all(), leaf.shape
    poisoned = [x.detach().clone() for x in (k, v)]
    for x in poisoned:
        x[:10], x[30:] = 1e3, -1e3
    assert torch.equal(run(q.detach(), *poisoned, info, info, rules)[10:30], out.detach()[10:30])
    order = torch.cat([torch.arange(30, 43), torch.arange(0, 30)])
    turned = run(*(x.detach()[order] for x in (q, k, v)), moved, moved, rules)
    torch.testing.assert_close(turned, out.detach()[order], rtol=1e-2, atol=1e-2 if dtype != torch.float32 else 1e-5)


def cuda(**changes: Any) -> Need:
    return Need(**{"device": "cuda", "dtype": torch.bfloat16, "head_width": 64, **changes})


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize(
    ("need", "backend"),
    [
        (Need("cpu", torch.float32, 64), "split"),
        (Need("cpu", torch.bfloat16, 64, window=True), "qblock"),
        (Need("cpu", torch.bfloat16, 64, softcap=True), "qblock"),
        (Need("cpu", torch.float32, 64, bias=True), "qblock"),
        (cuda(), "varlen"),
        (cuda(window=True), "varlen"),
        (cuda(softcap=True), "flex"),
        (cuda(bias=True), "flex"),
        (cuda(head_width=36), "split"),
        (cuda(blind_queries=True), "split"),
        (cuda(dtype=torch.float32), "split"),
        (cuda(dtype=torch.float32, window=True), "flex"),
        (cuda(dtype=torch.float64, window=True), "qblock"),
    ],
    ids=str,
)
def test_auto_takes_the_first_preferred_backend_that_can(need: Need, backend: str) -> None:
    choice = choose_backend("auto", need)
    assert choice.backend == backend
    assert choice.why
    assert str(choice) == f"{backend} ({choice.why})"


@pytest.mark.usefixtures("ampere", "fake_packages")
def test_auto_takes_a_flash_package_for_a_cap() -> None:
    select.choose_backend.cache_clear()
    assert choose_backend("auto", cuda(softcap=True)).backend == "flash"
    select.choose_backend.cache_clear()


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize(
    ("backend", "need", "reason"),
    [
        ("varlen", Need("cpu", torch.bfloat16, 64), "its kernels need a CUDA device, and the tensors are on cpu"),
        ("flash", Need("cpu", torch.bfloat16, 64), "its kernels need a CUDA device"),
        ("flex", Need("cpu", torch.float32, 64), "compiles its backward pass for CUDA only"),
        ("split", Need("cpu", torch.float32, 64, window=True, bias=True), "whole documents only, without window and"),
        ("sdpa", Need("cpu", torch.float32, 64, softcap=True), "no SDPA kernel caps scores"),
        ("varlen", cuda(dtype=torch.float32), "compute in bf16 and fp16, and the tensors are float32"),
        ("varlen", cuda(softcap=True), "torch's operator has no soft-cap"),
        ("varlen", cuda(bias=True), "add no bias"),
        ("varlen", cuda(head_width=257), "these are 257 wide"),
        ("varlen", cuda(blind_queries=True), "more queries than keys"),
        ("varlen_fa3", cuda(), "FA3 does not run on compute capability 8.0"),
        ("flash", cuda(), "no FlashAttention package for this device is installed"),
        ("flex", cuda(head_width=8), "heads of 16 or more"),
        ("flex", cuda(dtype=torch.float64), "no fp64"),
    ],
    ids=str,
)
def test_a_named_backend_that_cannot_run_is_an_error_that_says_why(backend: str, need: Need, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        choose_backend(backend, need)
    text = str(caught.value)
    assert text.startswith(f"model.attention={backend} cannot run here: ")
    assert reason in text
    assert "Set model.attention=auto, or one of " in text


def test_attend_refuses_a_named_backend_and_an_unknown_one() -> None:
    q, k, v, _, _ = inputs(self_case(4), torch.float32)
    info = SeqInfo.from_lengths([4])
    with pytest.raises(UserError, match=r"model\.attention=sdpa cannot run here: no SDPA kernel caps"):
        attend(q, k, v, q_info=info, causal=True, scale=SCALE, softcap=5.0, backend="sdpa")
    with pytest.raises(UserError, match=r"model\.attention=split cannot run here: it computes whole documents only"):
        attend(q, k, v, q_info=info, causal=True, scale=SCALE, window=2, backend="split")
    with pytest.raises(UserError, match=r"model\.attention=flash9 is unknown"):
        attend(q, k, v, q_info=info, causal=True, scale=SCALE, backend="flash9")


def test_a_window_as_long_as_the_longest_document_is_none() -> None:
    q, k, v, _, _ = inputs(self_case(4, 3), torch.float32)
    info = SeqInfo.from_lengths([4, 3])
    whole = attend(q, k, v, q_info=info, causal=True, scale=SCALE, backend="split")
    assert torch.equal(attend(q, k, v, q_info=info, causal=True, scale=SCALE, window=4, backend="split"), whole)


def test_the_config_knows_every_backend_and_says_before_training_which_one_runs() -> None:
    for name in ["auto", *backend_names()]:
        assert decoder_config(attention=name).attention == name
    choice = explain_attention(decoder_config(), torch.device("cpu"), "bf16")
    assert str(choice) == "split (whole documents, one fused kernel call each)"
    with pytest.raises(UserError, match=r"model\.attention=varlen cannot run here"):
        explain_attention(decoder_config(attention="varlen"), torch.device("cpu"), "bf16")
