"""Chooses the next token from logits: greedy, or temperature, top-k and top-p, keyed.

Takes logits [V] and a key → one id. The same logits and key give the same id on every machine and
whatever else draws random numbers: the uniform comes from a generator of its own, seeded by
(seed, position), and is inverted through the sorted distribution in float64.
Source: top-p is nucleus sampling, Holtzman et al. 2020.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pretrain.errors import UserError


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How the next token is chosen.

    Attributes:
        temperature: divides the logits; 0 means greedy.
        top_k: only the k most likely ids; None means all.
        top_p: only the smallest set of most likely ids whose probability reaches p, 0 < p <= 1.
        seed: key of the randomness.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises UserError for a value outside its range."""
        if not 0 <= self.temperature < float("inf"):
            raise UserError(
                f"temperature={self.temperature} is not a number >= 0. Use 0 for greedy, 0.8 or 1.0 to sample."
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k} keeps no token. It must be at least 1. Leave it out to keep all.")
        if not 0 < self.top_p <= 1:
            raise UserError(
                f"top_p={self.top_p} is outside (0, 1]. It is a probability. Leave it out to keep all tokens."
            )


def choose(logits_V: Float[Tensor, " V"], options: SamplingOptions, position: int) -> int:
    """One token id.

    Args:
        logits_V: scores of the next token; -inf excludes an id.
        position: index of the token being chosen; makes each draw independent of the others.

    Raises:
        UserError: the logits are not numbers (a broken checkpoint or diverged run).
    """
    if torch.isnan(logits_V).any() or not torch.isfinite(logits_V.max()):
        raise UserError(
            "the model's logits are not finite. Its weights are broken or the run diverged. Use an earlier checkpoint."
        )
    if options.temperature == 0:
        return int(torch.argmax(logits_V))
    probabilities_V = distribution(logits_V, options)
    sorted_V, ids_V = torch.sort(probabilities_V, descending=True, stable=True)
    cumulative_V = torch.cumsum(sorted_V, 0)
    point = uniform(options.seed, position) * float(cumulative_V[-1])
    place = int(torch.searchsorted(cumulative_V, torch.tensor(point, dtype=torch.float64), right=True))
    last = int((sorted_V > 0).sum()) - 1  # rounding must not reach an excluded id
    return int(ids_V[min(place, last)])


def distribution(logits_V: Float[Tensor, " V"], options: SamplingOptions) -> Float[Tensor, " V"]:
    """Probabilities that the next token is drawn from, float64 on the CPU; excluded ids have 0.

    Top-k is applied before top-p; ties at the edge go to the smaller id. Needs a temperature above 0.
    """
    scaled_V = logits_V.detach().to("cpu", torch.float64)
    scaled_V = (scaled_V - scaled_V.max()) / options.temperature  # shifted first: a tiny temperature must not overflow
    probabilities_V = torch.softmax(scaled_V, dim=0)
    sorted_V, ids_V = torch.sort(probabilities_V, descending=True, stable=True)
    if options.top_k is not None:
        sorted_V[options.top_k :] = 0.0
        sorted_V /= sorted_V.sum()
    if options.top_p < 1:
        before_V = torch.cumsum(sorted_V, 0) - sorted_V
        sorted_V[before_V >= options.top_p] = 0.0  # keeps the token that crosses p, and always the first
        sorted_V /= sorted_V.sum()
    return torch.zeros_like(probabilities_V).scatter_(0, ids_V, sorted_V)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a pure function of (seed, position): 53 bits of BLAKE2b."""
    digest = hashlib.blake2b(f"sample:{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53
