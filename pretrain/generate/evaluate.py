"""Losses of a data set from sums, never from means of means. PURE.

Takes sums over targets (nats, target tokens, target bytes) → loss, perplexity, bits per byte. Sums
of any split over batches and ranks add up to the same totals, so the result does not depend on batch
size or number of ranks. Accumulate in float64 (Python floats): fp32 loses digits after ~1e5 batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LossTotals:
    """Sums over targets; totals of disjoint parts add with `+`.

    Attributes:
        nats: summed negative log-likelihood of the targets.
        target_tokens: targets that counted.
        target_bytes: bytes of text that exactly those targets spell.
    """

    nats: float = 0.0
    target_tokens: int = 0
    target_bytes: int = 0

    def __add__(self, other: LossTotals) -> LossTotals:
        return LossTotals(
            self.nats + other.nats,
            self.target_tokens + other.target_tokens,
            self.target_bytes + other.target_bytes,
        )

    @property
    def loss(self) -> float:
        """Nats per target token; NaN when there is no target (not 0, which would look perfect)."""
        return self.nats / self.target_tokens if self.target_tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp(loss); inf where that overflows."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float:
        """nats / (ln 2 x bytes): comparable between tokenizers; NaN when the targets spell no byte."""
        return self.nats / (math.log(2) * self.target_bytes) if self.target_bytes else math.nan

    def to_record(self) -> dict[str, float | int]:
        """The fields of a validation record (`pretrain.metrics.definitions.VALIDATION_FIELDS`)."""
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "target_tokens": self.target_tokens,
            "target_bytes": self.target_bytes,
        }


def total(parts: Iterable[LossTotals]) -> LossTotals:
    """The sum of disjoint parts; of none, empty totals."""
    return sum(parts, LossTotals())
