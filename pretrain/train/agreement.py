"""What all ranks know about a step before they compute it: one early all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.data.batch import sum_digests
from pretrain.data.loader import StepData
from pretrain.engine.distributed import all_reduce_sums
from pretrain.train.stop import StopReason


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know about a step before they compute it.

    Attributes:
        target_tokens: labels that count, all ranks.
        data_digest: of the step's micro-batches, whatever the number of ranks.
        masked_rows: rows without labels because their block is corrupt.
        newly_corrupt: blocks found corrupt by this read; above 0 the step must be read again.
        stop: the strongest wish of any rank.
        save_due: rank 0's clock wants a durable save after this step.
    """

    target_tokens: int
    data_digest: int
    masked_rows: int
    newly_corrupt: int
    stop: StopReason
    save_due: bool


def agree(data: StepData, wish: StopReason, *, save_due: bool = False) -> Agreement:
    """The step's early all-reduce; a collective."""
    tokens, digest, masked_rows, corrupt, interrupts, stops, due = all_reduce_sums(
        [
            data.target_tokens,
            data.digest,
            data.masked_rows,
            len(data.corrupt),
            int(wish is StopReason.INTERRUPT),
            int(wish is StopReason.STOP),
            int(save_due),
        ]
    )
    stop = StopReason.STOP if stops else StopReason.INTERRUPT if interrupts else StopReason.NONE
    return Agreement(int(tokens), sum_digests([int(digest)]), int(masked_rows), int(corrupt), stop, bool(due))
