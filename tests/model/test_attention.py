"""Every backend against a float64 softmax over a mask that plain loops write down."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from pretrain.errors import UserError
from pretrain.model.attention import RelativeBias, attend, backend_names
from pretrain.sequence import SeqInfo

LENGTHS = (9, 1, 20, 13)
EQUAL = (16, 16, 16)
SCALE = 0.25


def tensors(q_count: int, k_count: int, *, heads: int = 4, groups: int = 2, std: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(q_count * 1000 + k_count)
    shapes = [(q_count, heads, 8), (k_count, groups, 8), (k_count, groups, 8), (q_count, heads, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) * std for shape in shapes]


def loop_mask(q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], causal: bool, window: int | None) -> torch.Tensor:
    mask = torch.zeros(sum(q_lengths), sum(k_lengths), dtype=torch.bool)
    q_start = k_start = 0
    for q_length, k_length in zip(q_lengths, k_lengths, strict=True):
        for i in range(q_length):
            for j in range(k_length):
                distance = i + k_length - q_length - j
                near = window is None or abs(distance) < window
                mask[q_start + i, k_start + j] = near and (distance >= 0 or not causal)
        q_start, k_start = q_start + q_length, k_start + k_length
    return mask


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, softcap: float | None = None
) -> torch.Tensor:
    """float64, one head at a time."""
    group = q.shape[1] // k.shape[1]
    heads = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T * SCALE
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        heads.append(torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1) @ v[:, head // group])
    return torch.stack(heads, dim=1)


def relative_error(found: torch.Tensor, right: torch.Tensor) -> float:
    return ((found.detach().double() - right.detach()).norm() / right.detach().norm()).item()


BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("backend", [*backend_names(), "auto"])
@pytest.mark.parametrize("lengths", [LENGTHS, EQUAL, (40,)], ids=str)
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 4), (False, 4), (True, 1)])
def test_output_and_gradients_equal_the_float64_definition(
    lengths: tuple[int, ...], causal: bool, window: int | None, backend: str, dtype: torch.dtype
) -> None:
    bound = BOUNDS[dtype]
    exact = tensors(sum(lengths), sum(lengths))
    grad_out = exact.pop().to(dtype)
    ours = [x.to(dtype).requires_grad_() for x in exact]
    rounded = [x.detach().double().requires_grad_() for x in ours]
    right = expected(*rounded, loop_mask(lengths, lengths, causal, window))
    right.backward(grad_out.double())
    out = attend(
        *ours, q_info=SeqInfo.from_lengths(lengths), causal=causal, window=window, scale=SCALE, backend=backend
    )
    out.backward(grad_out)
    assert out.dtype == dtype
    assert relative_error(out, right) < bound
    for found, reference in zip(ours, rounded, strict=True):
        if reference.grad is not None and reference.grad.norm() > 1e-9:
            assert relative_error(found.grad, reference.grad) < bound


@pytest.mark.parametrize("backend", backend_names())
@pytest.mark.parametrize(("q_lengths", "k_lengths"), [((3, 5), (7, 2)), ((4, 4), (6, 6)), ((2, 1), (9, 4))], ids=str)
def test_cross_attention_sees_the_whole_own_source_and_nothing_else(
    q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], backend: str
) -> None:
    q, k, v, _ = tensors(sum(q_lengths), sum(k_lengths))
    out = attend(
        q, k, v, q_info=SeqInfo.from_lengths(q_lengths), k_info=SeqInfo.from_lengths(k_lengths), causal=False,
        scale=SCALE, backend=backend,
    )  # fmt: skip
    torch.testing.assert_close(out, expected(q, k, v, loop_mask(q_lengths, k_lengths, False, None)))


@pytest.mark.parametrize("backend", backend_names())
@pytest.mark.parametrize("new", [1, 3])
def test_causal_with_more_keys_than_queries_puts_the_last_query_at_the_last_key(backend: str, new: int) -> None:
    q, k, v, _ = tensors(10, 10)
    everything = attend(q, k, v, q_info=SeqInfo.from_lengths([10]), causal=True, scale=SCALE, backend=backend)
    tail = attend(
        q[-new:], k, v, q_info=SeqInfo.from_lengths([new]), k_info=SeqInfo.from_lengths([10]), causal=True,
        scale=SCALE, backend=backend,
    )  # fmt: skip
    torch.testing.assert_close(tail, everything[-new:])


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("backend", backend_names())
def test_query_heads_share_key_heads_in_groups(backend: str, groups: int) -> None:
    q, k, v, _ = tensors(43, 43, groups=groups)
    out = attend(q, k, v, q_info=SeqInfo.from_lengths(LENGTHS), causal=True, scale=SCALE, backend=backend)
    torch.testing.assert_close(out, expected(q, k, v, loop_mask(LENGTHS, LENGTHS, True, None)))


@pytest.mark.parametrize("lengths", [LENGTHS, EQUAL], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_split_is_bitwise_the_document_alone_and_blind_to_the_others(
    lengths: tuple[int, ...], dtype: torch.dtype
) -> None:
    q, k, v, _ = (x.to(dtype) for x in tensors(sum(lengths), sum(lengths)))
    info = SeqInfo.from_lengths(lengths)
    packed = attend(q, k, v, q_info=info, causal=True, scale=SCALE, backend="split")
    own = slice(sum(lengths[:2]), sum(lengths[:3]))
    alone = attend(
        q[own], k[own], v[own], q_info=SeqInfo.from_lengths([lengths[2]]), causal=True, scale=SCALE, backend="split"
    )
    assert torch.equal(packed[own], alone)
    for poison in (1e4, float("nan")):
        bad_k, bad_v = k.clone(), v.clone()
        bad_k[: own.start], bad_v[: own.start] = poison, poison
        assert torch.equal(
            attend(q, bad_k, bad_v, q_info=info, causal=True, scale=SCALE, backend="split")[own], packed[own]
        )


@pytest.mark.parametrize("backend", backend_names())
def test_no_gradient_crosses_a_document_edge(backend: str) -> None:
    q, k, v, _ = (x.float().requires_grad_() for x in tensors(43, 43))
    out = attend(q, k, v, q_info=SeqInfo.from_lengths(LENGTHS), causal=True, scale=SCALE, backend=backend)
    out[10:30].sum().backward()  # the third document
    for tensor in (k, v):
        assert tensor.grad[10:30].abs().sum() > 0
        assert tensor.grad[:10].abs().sum() == 0
        assert tensor.grad[30:].abs().sum() == 0


@pytest.mark.parametrize("backend", backend_names())
def test_permuting_the_documents_permutes_the_output(backend: str) -> None:
    q, k, v, _ = tensors(43, 43)
    out = attend(q, k, v, q_info=SeqInfo.from_lengths(LENGTHS), causal=True, scale=SCALE, backend=backend)
    order = torch.cat([torch.arange(30, 43), torch.arange(0, 30)])
    moved = attend(
        q[order], k[order], v[order], q_info=SeqInfo.from_lengths((13, 9, 1, 20)), causal=True, scale=SCALE,
        backend=backend,
    )  # fmt: skip
    torch.testing.assert_close(moved, out[order])


def test_gradcheck_in_float64_for_both_ways_through_split() -> None:
    for lengths in ((2, 3), (2, 2)):
        inputs = [x.requires_grad_() for x in tensors(sum(lengths), sum(lengths), heads=2, groups=1)[:3]]
        info = SeqInfo.from_lengths(lengths)

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, info: SeqInfo = info) -> torch.Tensor:
            return attend(q, k, v, q_info=info, causal=True, scale=SCALE)

        assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("backend", ["split", "reference"])
@pytest.mark.parametrize("lengths", [LENGTHS, EQUAL], ids=str)
def test_softcap_equals_the_definition(lengths: tuple[int, ...], backend: str) -> None:
    q, k, v, _ = tensors(sum(lengths), sum(lengths), std=4.0)
    out = attend(q, k, v, q_info=SeqInfo.from_lengths(lengths), causal=True, scale=SCALE, softcap=5.0, backend=backend)
    mask = loop_mask(lengths, lengths, True, None)
    torch.testing.assert_close(out, expected(q, k, v, mask, softcap=5.0))
    assert relative_error(out, expected(q, k, v, mask)) > 1e-2  # the cap did something


@pytest.mark.parametrize("backend", backend_names())
@pytest.mark.parametrize("lengths", [LENGTHS, EQUAL], ids=str)
def test_a_relative_bias_is_added_by_place_and_is_trained(lengths: tuple[int, ...], backend: str) -> None:
    table_H = torch.tensor([0.1, -0.2, 0.3, 0.7], dtype=torch.float64, requires_grad=True)

    bias = RelativeBias(lambda relative, slopes: relative * slopes[:, None], (table_H,))
    q, k, v, grad_out = tensors(sum(lengths), sum(lengths))
    out = attend(q, k, v, q_info=SeqInfo.from_lengths(lengths), causal=True, scale=SCALE, bias=bias, backend=backend)
    out.backward(grad_out)
    # Alibi by hand: the bias of key j and query i is slope * (j - i), also across the packed whole.
    twin_H = table_H.detach().clone().requires_grad_()
    place = torch.arange(sum(lengths), dtype=torch.float64)
    mask = loop_mask(lengths, lengths, True, None)
    scores = [q[:, h] @ k[:, h // 2].T * SCALE + twin_H[h] * (place[None] - place[:, None]) for h in range(4)]
    weights = [torch.softmax(score.masked_fill(~mask, -torch.inf), dim=-1) for score in scores]
    right = torch.stack([weight @ v[:, h // 2] for h, weight in enumerate(weights)], dim=1)
    right.backward(grad_out)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(table_H.grad, twin_H.grad)


def test_the_plain_cases_run_on_the_flash_kernel() -> None:
    q, k, v, _ = (x.float() for x in tensors(43, 43))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):  # raises where another kernel would be needed
        attend(q, k, v, q_info=SeqInfo.from_lengths(LENGTHS), causal=True, scale=SCALE)
        attend(q, k, v, q_info=SeqInfo.from_lengths((43,)), causal=True, scale=SCALE, backend="sdpa")
        attend(q, k, v, q_info=SeqInfo.from_lengths(LENGTHS), causal=False, scale=SCALE, backend="sdpa")


def test_one_and_two_threads_give_the_same_bits() -> None:
    q, k, v, _ = (x.float() for x in tensors(43, 43))
    before, outs = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            outs.append(attend(q, k, v, q_info=SeqInfo.from_lengths(LENGTHS), causal=True, scale=SCALE))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*outs)


def test_a_forced_backend_that_cannot_run_is_an_error() -> None:
    q, k, v, _ = tensors(4, 4)
    info = SeqInfo.from_lengths([4])
    with pytest.raises(UserError, match=r"model\.attention=sdpa cannot cap scores .* Set model\.attention=auto"):
        attend(q, k, v, q_info=info, causal=True, scale=SCALE, softcap=5.0, backend="sdpa")
    with pytest.raises(UserError, match=r"model\.attention=flash9 is unknown"):
        attend(q, k, v, q_info=info, causal=True, scale=SCALE, backend="flash9")


def test_layouts_that_do_not_fit_the_tensors_are_errors() -> None:
    q, k, v, _ = tensors(4, 4)
    with pytest.raises(ValueError, match="do not match"):
        attend(q, k, v, q_info=SeqInfo.from_lengths([3]), causal=True, scale=SCALE)
    with pytest.raises(ValueError, match="must pair up"):
        attend(
            q, k, v, q_info=SeqInfo.from_lengths([4]), k_info=SeqInfo.from_lengths([2, 2]), causal=False, scale=SCALE
        )
