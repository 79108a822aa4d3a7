"""What a loader delivers: one step's micro-batches for one rank."""

from __future__ import annotations

from typing import NamedTuple

from pretrain.sequence import Batch


class StepData(NamedTuple):
    """One step's rows for one rank.

    Attributes:
        step: optimizer step, from 0.
        batches: this rank's micro-batches, ceil(J/R) of them; empty ones (index -1) last.
        target_tokens: labels that count in them.
        digest: their digest; `sum_digests` over the ranks is the same for every number of ranks.
        masked_rows: rows in them that lost their labels to a corrupt block.
        corrupt: (source index, block) found corrupt by this read and not yet in the state's quarantine.
    """

    step: int
    batches: tuple[Batch, ...]
    target_tokens: int
    digest: int
    masked_rows: int
    corrupt: tuple[tuple[int, int], ...] = ()
