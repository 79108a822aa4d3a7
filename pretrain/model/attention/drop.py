"""Dropout on the weights of attention, whose mask is a formula of (seed, head, query, key).

Every element's fate can be computed alone, so a backend that computes weights block by block, or again in the
backward pass, drops the same ones as a dense matrix would, bit for bit; and no random state is kept. Kernels
that draw from the device's own generator cannot promise that, so their backends refuse.
Source: own; two rounds of the integer hash lowbias32 (C. Wellons), whose high bits decide.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain.model.dropout import mix

_WEIGHTS, _PARTS = 1 << 40, 1 << 41  # beyond every site of a model
_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32))
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


@dataclass(frozen=True, slots=True)
class WeightDropout:
    """Zeroes weights with probability p and scales the others by 1 / (1 - p).

    Attributes:
        p: 0 < p < 1, exact to 2^-32.
        seed: of this call's mask.
    """

    p: float
    seed: int

    def part(self, number: int) -> WeightDropout:
        """For one of the calls that a call is split into, whose tokens are counted anew."""
        return WeightDropout(self.p, mix(self.seed, _PARTS + number))

    def factors(self, heads: int, q_place: range, k_place: range, like: Tensor) -> Tensor:
        """[heads, queries, keys] of 0 or 1 / (1 - p) in the dtype and on the device of `like`.

        Args:
            q_place, k_place: packed places of the queries and the keys.
        """
        device = like.device
        queries = torch.arange(q_place.start, q_place.stop, device=device)
        keys = torch.arange(k_place.start, k_place.stop, device=device)
        row_HQ = torch.arange(heads, device=device)[:, None] * 2**32 + queries
        codes = _code(row_HQ, mix(self.seed, 0))[:, :, None] ^ _code(keys, mix(self.seed, 1))
        for shift, factor in _ROUNDS:
            codes ^= (codes >> shift).bitwise_and_(2 ** (32 - shift) - 1)  # without the copies of the sign
            codes *= factor
        kept = codes >= round(self.p * 2**32) - 2**31
        return kept.to(like.dtype).mul_(1.0 / (1.0 - self.p))


def weight_dropout(p: float, key: int, site: int, *, training: bool) -> WeightDropout | None:
    """The dropout of a place in the model for a micro-batch's key; None where nothing is dropped."""
    return WeightDropout(p, mix(mix(key, site), _WEIGHTS)) if p > 0.0 and training else None


def _code(places: Tensor, seed: int) -> Tensor:
    """A well-mixed int32 for each int64."""
    x = (places + seed) * _GOLDEN
    x ^= (x >> 31) & (2**33 - 1)
    x *= _GOLDEN
    return (x >> 32).to(torch.int32)
