"""Attention with a first part that sees itself in both directions, against dense float64 attention with that mask."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from pretrain.data.batch import seq_info
from pretrain.model.attention import RelativeBias, attend
from pretrain.model.registry import build_model
from pretrain.sequence import IGNORED_LABEL, Batch
from tests.model.attention_cases import slope_values

SCALE = 0.3
CASES = {
    "every kind": ([5, 1, 7, 3, 4], [2, 0, 7, 1, 0], False),
    "no second part": ([3, 4], [3, 4], False),
    "no first part": ([3, 4], [0, 0], False),
    "padding": ([5, 6, 4], [2, 6, 0], True),
    "only padding": ([6], [0], True),
}


def visible(lengths: list[int], prefixes: list[int]) -> torch.Tensor:
    """[T, T] from the definition: same document, and the key is before the query or in a first part with it."""
    places = [(d, i) for d, length in enumerate(lengths) for i in range(length)]
    mask = torch.zeros(len(places), len(places), dtype=torch.bool)
    for a, (document, i) in enumerate(places):
        for b, (other, j) in enumerate(places):
            mask[a, b] = document == other and (j <= i or max(i, j) < prefixes[document])
    return mask


@pytest.mark.parametrize(
    ("backend", "biased"),  # split computes no bias
    [("split", False), *itertools.product(("auto", "qblock", "sdpa", "reference"), (False, True))],
)
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_a_dense_mask(backend: str, case: str, biased: bool) -> None:
    lengths, prefixes, padded = CASES[case]
    total = sum(lengths)
    generator = torch.Generator().manual_seed(total)
    q, k, v, weight = (torch.randn(total, h, 4, generator=generator, dtype=torch.float64) for h in (4, 2, 2, 4))
    slopes = torch.randn(4, generator=generator, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    bias = RelativeBias(slope_values, (slopes,)) if biased else None
    info = seq_info(np.array(lengths), padding=padded, prefixes=np.array(prefixes))
    out = attend(*leaves, q_info=info, causal=True, scale=SCALE, bias=bias, backend=backend)

    twins = [x.clone().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(2, dim=1) for x in twins[1:])
    scores = torch.einsum("qhc,khc->hqk", twins[0], keys) * SCALE
    if biased:
        place = info.positions
        scores = scores + slope_values((place[None, :] - place[:, None]).flatten(), slopes).view(scores.shape)
    scores = scores.masked_fill(~visible(lengths, prefixes), -torch.inf)
    expected = torch.einsum("hqk,khc->qhc", scores.softmax(-1), values)
    real = total - lengths[-1] if padded else total
    torch.testing.assert_close(out[:real], expected[:real], rtol=1e-10, atol=1e-12)
    assert not out[real:].any()
    (out[:real] * weight[:real]).sum().backward()
    (expected[:real] * weight[:real]).sum().backward()
    for mine, theirs in zip(leaves, twins, strict=True):
        assert mine.grad is not None  # also of padding alone: every parameter takes part in ZeRO's collectives
        torch.testing.assert_close(mine.grad, theirs.grad if real else torch.zeros_like(mine), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("family", ["decoder", "gpt2"])
def test_a_change_in_the_prefix_reaches_its_first_token_and_one_behind_it_does_not(family: str) -> None:
    from pretrain.config.schema import DecoderConfig, GPT2Config, LossConfig

    sizes = {"vocabulary_size": 40, "width": 16, "num_heads": 2, "feed_forward_width": 24, "num_layers": 2}
    config = (
        DecoderConfig(**sizes, init_std=0.3)
        if family == "decoder"
        else GPT2Config(**sizes, max_length=16, init_std=0.3)
    )
    model = build_model(config, LossConfig(), seed=3).double().eval()

    def logits(ids: list[int], prefixes: list[int] | None) -> torch.Tensor:
        info = seq_info(np.array([8, 4]), prefixes=None if prefixes is None else np.array(prefixes))
        labels = torch.full((12,), IGNORED_LABEL)
        with torch.no_grad():
            found: torch.Tensor = model.logits(Batch(0, torch.tensor(ids), info, labels, None, None, 0, 0, 0, 0))
        return found

    ids = list(range(1, 13))
    inside, behind, other = [*ids], [*ids], [*ids]
    inside[3], behind[5], other[9] = 30, 30, 30
    for prefixes, reached in (([4, 0], True), ([1, 2], False), (None, False)):
        base = logits(ids, prefixes)
        assert bool((logits(inside, prefixes)[0] != base[0]).any()) == reached
        assert torch.equal(logits(behind, prefixes)[:5], base[:5])
        assert torch.equal(logits(other, prefixes)[:8], base[:8])
