"""What one call of attention computes, apart from its tensors: the value that every backend obeys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain.model.attention.drop import WeightDropout


@dataclass(frozen=True, slots=True)
class RelativeBias:
    """A bias that depends on key place - query place only, held as a formula and never as a matrix.

    Attributes:
        values: from int64 relative places [R], then `tensors` -> [H, R].
        tensors: what `values` reads besides the places (a trained table, slopes); gradients reach them.
            Backends that recompute want them named here, not captured by `values`.
    """

    values: Callable[..., Tensor]
    tensors: tuple[Tensor, ...] = ()

    def __call__(self, relative: Tensor) -> Tensor:
        """Int64 of any shape -> [H, *shape]; as large as it looks, so only for the dense backends."""
        return self.values(relative.flatten(), *self.tensors).unflatten(-1, relative.shape)

    def diagonals(self, reach: int, device: torch.device) -> Tensor:
        """[H, 2 reach - 1]: the bias at every relative place from 1 - reach to reach - 1."""
        return self.values(torch.arange(1 - reach, reach, device=device), *self.tensors)


@dataclass(frozen=True, slots=True)
class AttentionRules:
    """Limits and shape of the scores.

    Attributes:
        causal: a query sees no later key; where a document has more keys than queries (a cache), the
            last query stands at the last key.
        scale: factor of q k^T, always explicit.
        window: a query sees the keys less than `window` tokens away; None is no limit.
        softcap: scores become cap * tanh(score / cap); None is no cap.
        bias: added to the scores by relative place (after the cap), or None.
        dropout: of the weights, or None.
    """

    causal: bool
    scale: float
    window: int | None = None
    softcap: float | None = None
    bias: RelativeBias | None = None
    dropout: WeightDropout | None = None

    def allowed(self, distance: Tensor) -> Tensor:
        """Bool of the same shape: may a query see the key `distance` tokens before it (negative: after it)?"""
        if self.causal:
            allowed = distance >= 0
            return allowed if self.window is None else allowed & (distance < self.window)
        return distance.abs() < (self.window if self.window is not None else 2**62)
