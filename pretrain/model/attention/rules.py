"""What one call of attention computes, apart from its tensors: the value that every backend obeys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

RelativeBias = Callable[[Tensor], Tensor]
"""From int64 key place - query place [q, k] to what is added to the scores, [H, q, k]."""


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
    """

    causal: bool
    scale: float
    window: int | None = None
    softcap: float | None = None
    bias: RelativeBias | None = None

    def allowed(self, distance: Tensor) -> Tensor:
        """Bool of the same shape: may a query see the key `distance` tokens before it (negative: after it)?"""
        if self.causal:
            allowed = distance >= 0
            return allowed if self.window is None else allowed & (distance < self.window)
        return distance.abs() < (self.window if self.window is not None else 2**62)
