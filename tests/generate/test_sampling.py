"""Sampling against counted frequencies and plain NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pretrain.errors import UserError
from pretrain.generate.sampling import SamplingOptions, choose, distribution, uniform


def _reference(logits: np.ndarray, temperature: float, top_k: int | None, top_p: float) -> np.ndarray:
    """A plain loop: from the most likely down, keep until k tokens or probability p are reached."""
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    order = sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i))[: top_k or len(probabilities)]
    mass_k = sum(probabilities[i] for i in order)
    kept, reached = [], 0.0
    for i in order:
        kept.append(i)
        reached += probabilities[i] / mass_k
        if reached >= top_p:
            break
    out = np.zeros_like(probabilities)
    out[kept] = probabilities[kept] / probabilities[kept].sum()
    return out


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(("top_k", "top_p"), [(None, 1.0), (3, 1.0), (None, 0.7), (5, 0.4), (1, 0.9), (50, 0.999)])
def test_the_distribution_is_that_of_a_plain_loop(temperature: float, top_k: int | None, top_p: float) -> None:
    logits = np.random.default_rng(7).normal(size=20) * 3
    got = distribution(torch.tensor(logits), SamplingOptions(temperature, top_k, top_p)).numpy()
    np.testing.assert_allclose(got, _reference(logits, temperature, top_k, top_p), atol=1e-12)


def test_draws_follow_the_distribution() -> None:
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    options = SamplingOptions(temperature=1.0, seed=3)
    count = 4000
    logits = torch.tensor(np.log(probabilities))
    counts = np.bincount([choose(logits, options, position) for position in range(count)], minlength=4)
    deviation = np.abs(counts - count * probabilities) / np.sqrt(count * probabilities * (1 - probabilities))
    assert deviation.max() < 4  # standard deviations


def test_the_same_seed_draws_the_same_whatever_else_draws_random_numbers() -> None:
    logits = torch.zeros(1000)
    options = SamplingOptions(temperature=1.0, seed=5)
    first = [choose(logits, options, i) for i in range(20)]
    torch.rand(7)
    assert [choose(logits, options, i) for i in range(20)] == first
    assert len(set(first)) > 15  # another position is another draw
    assert [choose(logits, SamplingOptions(temperature=1.0, seed=6), i) for i in range(20)] != first
    assert uniform(5, 0) == uniform(5, 0)
    assert all(0 <= uniform(5, i) < 1 for i in range(100))


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    assert choose(torch.tensor([0.0, 5.0, 5.0]), SamplingOptions(), 0) == 1


def test_an_excluded_id_never_comes_out() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0])
    options = SamplingOptions(temperature=10.0, seed=1)
    assert {choose(logits, options, i) for i in range(200)} == {1, 3}


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    options = SamplingOptions(temperature=1e-300, seed=1)
    assert choose(torch.tensor([1e4, 2e4, -3.0]), options, 0) == 1


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]])
def test_logits_that_are_not_numbers_are_an_error(bad: list[float]) -> None:
    with pytest.raises(UserError, match="not finite"):
        choose(torch.tensor(bad), SamplingOptions(), 0)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
    ],
)
def test_a_value_outside_its_range_is_named(wrong: dict[str, float], text: str) -> None:
    with pytest.raises(UserError, match=text):
        SamplingOptions(**wrong)
