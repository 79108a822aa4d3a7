"""THE loop: one optimizer step after the other, the same on every rank.

takes → a Training (everything built); gives → the exit code of this rank.
Invariants: ranks agree before anything irreversible (one early all-reduce a step carries targets,
digest, corrupt blocks and stop wishes); state is saved at step boundaries only; nothing random is
drawn here.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace

import torch

from pretrain.data.batch import sum_digests
from pretrain.data.loader import StepData
from pretrain.engine.distributed import all_reduce_sums, gather_texts
from pretrain.engine.engine import StepOutcome
from pretrain.errors import ExitCode, HealthError
from pretrain.faults import passing
from pretrain.optim.schedules import learning_rate_at
from pretrain.train.build import Training
from pretrain.train.state import TrainingState
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


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did on this rank, before its losses are summed over the ranks."""

    agreed: Agreement
    outcome: StepOutcome
    learning_rate: float
    sums: torch.Tensor  # float64 [3]: objective, nll, z-loss; stays on the device until a record is written
    data_wait_s: float


def train(training: Training) -> ExitCode:
    """Trains from the newest good checkpoint, or from the start, to the end of the schedule. A collective.

    Raises:
        HealthError: too many steps in a row were skipped.
        PretrainError: data, store, checkpoint or a peer failed.
    """
    config, heartbeat = training.config, training.place.heartbeat
    state = training.restore()
    training.start_clock()
    while state.step < config.schedule.total_steps:
        started = time.perf_counter()
        state, data, agreed = _read_step(training, state)
        data_wait_s = time.perf_counter() - started
        if agreed.stop is not StopReason.NONE:
            return _end_early(training, state, agreed.stop)

        record = _optimize(training, state, data, agreed, data_wait_s)
        after = training.loader.next_state(state.data)
        state = state.after(after, target_tokens=agreed.target_tokens, applied=record.outcome.applied)
        training.throughput.finish_step(agreed.target_tokens)

        last = state.step == config.schedule.total_steps
        if last or state.step % config.metrics.log_every_steps == 0 or not record.outcome.applied:
            _log_step(training, state, record)
            passing("step.logged")
        _check_health(training, state)
        if _due(state.step, config.eval.every_steps) or (last and config.eval.every_steps):
            with training.throughput.excluded():
                training.validate(state)
        if (agreed.save_due or _due(state.step, config.checkpoint.every_steps)) and not last:
            with training.throughput.excluded():
                heartbeat.phase("save", state.step, collective=True)
                training.save(state)
        elif _due(state.step, config.checkpoint.ram_every_steps) and not last:
            with training.throughput.excluded():
                heartbeat.phase("save", state.step, collective=True)
                training.copy_to_memory(state)
        else:
            training.saver.poll()
    _save_for_good(training, state)
    training.place.reporter.event("completed", step=state.step)
    heartbeat.phase("done", state.step)
    return ExitCode.DONE


def _due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0


def _read_step(training: Training, state: TrainingState) -> tuple[TrainingState, StepData, Agreement]:
    """The step's micro-batches and what all ranks agree on; a corrupt block that is masked is read around."""
    heartbeat, loader = training.place.heartbeat, training.loader
    while True:
        passing("step.begins")
        heartbeat.phase("data", state.step)
        data = loader.read(state.step, state.data)
        heartbeat.phase("step", state.step, collective=True)
        agreed = agree(data, training.place.stop.reason, save_due=training.saver.time_is_up)
        passing("step.agreed")
        if not agreed.newly_corrupt:
            return state, data, agreed
        # Only the rank that read a block knows that it is bad: all take it into their state and read again.
        found = {tuple(block) for text in gather_texts(json.dumps(data.corrupt)) for block in json.loads(text)}
        state = replace(state, data=loader.quarantine(state.data, sorted(found)))
        training.place.log.warning("corrupt blocks are masked from here on", blocks=sorted(found), step=state.step)


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


def _optimize(
    training: Training, state: TrainingState, data: StepData, agreed: Agreement, data_wait_s: float
) -> StepRecord:
    """Forward and backward over this rank's micro-batches, then the optimizer step. A collective."""
    total = torch.zeros(3, dtype=torch.float64, device=training.place.device)
    for batch in data.batches:
        sums = training.engine.micro_step(batch.to(training.place.device), global_target_tokens=agreed.target_tokens)
        training.place.heartbeat.phase("step", state.step)
        passing("step.microstep")
        total += torch.stack(sums)
    learning_rate = learning_rate_at(state.step, training.config.optimizer.learning_rate, training.config.schedule)
    passing("step.before_update")
    outcome = training.engine.step(learning_rate)
    passing("step.after_update")
    return StepRecord(agreed, outcome, learning_rate, total, data_wait_s)


def _log_step(training: Training, state: TrainingState, record: StepRecord) -> None:
    """Sums the losses over the ranks and hands a record to the sinks. A collective."""
    objective, nll, z_loss = all_reduce_sums(record.sums.tolist())
    targets = max(1, record.agreed.target_tokens)
    training.write_record(
        {
            "step": state.step,
            "loss": nll / targets,
            "objective": objective / targets,
            "z_loss": z_loss / targets,
            "learning_rate": record.learning_rate,
            "gradient_norm": record.outcome.gradient_norm,
            "applied": record.outcome.applied,
            "skipped_steps": state.skipped_steps,
            "target_tokens": record.agreed.target_tokens,
            "tokens": state.tokens,
            "masked_rows": record.agreed.masked_rows,
            "data_digest": f"{record.agreed.data_digest:012x}",
            "data_wait_s": record.data_wait_s,
            **training.throughput.rates(state.step).to_record(),
        }
    )


def _check_health(training: Training, state: TrainingState) -> None:
    limit = training.config.health.max_skipped_steps
    if state.consecutive_skips > limit:
        raise HealthError(
            f"{state.consecutive_skips} steps in a row had a non-finite gradient, up to step {state.step}. "
            f"health.max_skipped_steps={limit} allows no more. Lower optimizer.learning_rate, look at the rows with "
            f"pretrain data explain, or start again with other settings under another --name."
        )


def _end_early(training: Training, state: TrainingState, reason: StopReason) -> ExitCode:
    _save_for_good(training, state)
    if reason is StopReason.STOP:
        training.place.reporter.event("stopped", step=state.step)
        return ExitCode.STOPPED
    training.place.reporter.event("interrupted", step=state.step)
    return ExitCode.INTERRUPTED


def _save_for_good(training: Training, state: TrainingState) -> None:
    """Saves the last state unless that very step is saved already, and waits until it is published."""
    training.place.heartbeat.phase("save", state.step, collective=True)
    training.saver.save_for_good(state)
