"""What a step did, from this rank's sums to the record that the sinks get.

takes → sums of this rank; gives → their sum over the ranks, computed once however many ask, and a record.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from pretrain.engine.distributed import all_reduce_sums
from pretrain.engine.engine import StepOutcome
from pretrain.train.agreement import Agreement
from pretrain.train.build import Training
from pretrain.train.state import TrainingState
from pretrain.train.step_watch import StepWatch


@dataclass(slots=True)
class StepRecord:
    """What one step did on this rank.

    Attributes:
        sums: float64 [3]: objective, nll, z-loss; they stay on the device until somebody asks for the loss.
        watch: what else a logged step tells.
    """

    agreed: Agreement
    outcome: StepOutcome
    learning_rate: float
    sums: torch.Tensor
    watch: StepWatch | None = None
    _reduced: tuple[float, float, float] | None = field(default=None)

    def reduced(self) -> tuple[float, float, float]:
        """Objective, nll and z-loss summed over the ranks. A collective the first time."""
        if self._reduced is None:
            objective, nll, z_loss = all_reduce_sums(self.sums.tolist())
            self._reduced = float(objective), float(nll), float(z_loss)
        return self._reduced

    def loss(self) -> float | None:
        """Per target token, nats; None when the step had no targets. A collective the first time."""
        return self._per_target(self.reduced()[1])

    def _per_target(self, value: float) -> float | None:
        return value / self.agreed.target_tokens if self.agreed.target_tokens else None


def log_step(training: Training, state: TrainingState, record: StepRecord) -> None:
    """Gathers what the ranks know of the step and hands a record to the sinks. A collective."""
    rates = training.throughput.rates(state.step, flops_left=training.flops_left(state))
    t = time.time()  # as the clock of the steps was read: what recording takes is in the next record's steps
    times = training.times.gather(rates.step_s)
    tables = {} if record.watch is None else record.watch.tables(state.data)
    training.warn(state.step, tables.get("warnings", []))
    objective, nll, z_loss = (record._per_target(value) for value in record.reduced())
    training.write_record(
        {
            "t": t,
            "step": state.step,
            "loss": nll,
            "objective": objective,
            "z_loss": z_loss,
            "learning_rate": record.learning_rate,
            "gradient_norm": record.outcome.gradient_norm,
            "applied": record.outcome.applied,
            "skipped_steps": state.skipped_steps,
            "rollbacks": state.health.rollbacks,
            "target_tokens": record.agreed.target_tokens,
            "tokens": state.tokens,
            "masked_rows": record.agreed.masked_rows,
            "data_digest": f"{record.agreed.data_digest:012x}",
            **rates.to_record(),
            "peak_flops": training.throughput.peak_flops,
            **times,
            **tables,
        }
    )
