"""Dropout whose mask is a function of (key, site) only, not of any global random state.

The key comes with the micro-batch (seed, step, j), the site numbers the place in the model; so the
mask is the same whoever computes the micro-batch, after a resume, and when activation checkpointing
runs the layer again. Source: Srivastava et al. 2014 (inverted form), keying own.
"""

from __future__ import annotations

import torch
from torch import nn

_MASK_64 = 2**64 - 1


def mix(key: int, site: int) -> int:
    """A well-mixed 63-bit seed from a key and a site (the finaliser of splitmix64)."""
    x = (key + (site + 1) * 0x9E3779B97F4A7C15) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (x ^ (x >> 31)) >> 1


def keyed_dropout(x: torch.Tensor, p: float, key: int, site: int) -> torch.Tensor:
    """Zeroes elements with probability p and scales the others by 1 / (1 - p).

    Args:
        p: 0 <= p <= 1.
        key: the micro-batch's dropout key.
        site: which dropout of the model this is.
    """
    if p == 0.0:
        return x
    if p == 1.0:
        return x * 0.0
    generator = torch.Generator(device=x.device).manual_seed(mix(key, site))
    keep = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1.0 - p, generator=generator)
    return (x * keep) * (1.0 / (1.0 - p))


class Dropout(nn.Module):
    """A numbered place of the model where `keyed_dropout` runs in training mode."""

    def __init__(self, p: float, site: int) -> None:
        super().__init__()
        self.p = p
        self.site = site

    def forward(self, x: torch.Tensor, key: int) -> torch.Tensor:
        return keyed_dropout(x, self.p, key, self.site) if self.training else x

    def extra_repr(self) -> str:
        return f"p={self.p}, site={self.site}"
