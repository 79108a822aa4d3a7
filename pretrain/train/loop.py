"""THE loop: one optimizer step after the other, the same on every rank.

takes → a Training (everything built); gives → the exit code of this rank.
Invariants: ranks agree before anything irreversible (one early all-reduce a step carries targets,
digest, corrupt blocks and stop wishes); state is saved at step boundaries only, never behind a bad step;
nothing random is drawn here.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import torch

from pretrain.data.loader import StepData
from pretrain.engine.distributed import gather_texts
from pretrain.errors import ExitCode
from pretrain.faults import passing
from pretrain.optim.schedules import learning_rate_at
from pretrain.train.agreement import Agreement, agree
from pretrain.train.build import Training
from pretrain.train.records import StepRecord, log_step
from pretrain.train.remedy import compare_again, judge_step, roll_back
from pretrain.train.state import TrainingState
from pretrain.train.stop import StopReason


def train(training: Training) -> ExitCode:
    """Trains from the newest good checkpoint, or from the start, to the end of the schedule. A collective.

    Raises:
        HealthError: too many steps were bad, or there is nothing to go back to.
        PretrainError: data, store, checkpoint or a peer failed.
    """
    config, heartbeat = training.config, training.place.heartbeat
    state = training.restore()
    if state.step == 0 and config.health.spike_z_score is not None and training.saver.saved_step is None:
        training.save(state)  # a spike before the first checkpoint must find one
    training.start_clock()
    while state.step < config.schedule.total_steps:
        state, data, agreed = _read_step(training, state)
        if agreed.stop is not StopReason.NONE:
            return _end_early(training, state, agreed.stop)

        with training.profiler.step(state.step + 1):
            record = _optimize(training, state, data, agreed)
        before, after = state, training.loader.next_state(state.data)
        state = state.after(after, target_tokens=agreed.target_tokens, applied=record.outcome.applied)
        flops = training.flops_of(before.data.segment)
        training.throughput.finish_step(agreed.target_tokens, flops=flops[0], hardware_flops=flops[1])
        training.times.finish_step(data.target_tokens)

        last = state.step == config.schedule.total_steps
        if training.log_due(state.step) or not record.outcome.applied:
            log_step(training, state, record)
            passing("step.logged")
        finding = judge_step(training, before, record)
        if finding.back_to is not None:
            with training.going_back():
                state = roll_back(training, before, finding)
            continue
        state = replace(state, health=finding.state)
        _keep(training, state, save_due=agreed.save_due, last=last)
    _save_for_good(training, state)
    training.place.reporter.event("completed", step=state.step)
    heartbeat.phase("done", state.step)
    return ExitCode.DONE


def _keep(training: Training, state: TrainingState, *, save_due: bool, last: bool) -> None:
    """Validates and saves where the step says so. A collective then."""
    config, heartbeat = training.config, training.place.heartbeat
    if measures := training.measures_due(state.step, last=last):
        with training.throughput.excluded():
            training.measure(state, measures)
    # Behind a bad step lies nothing worth keeping, and what lies before it must not be pruned for it.
    wanted = not last and state.health.first_skipped is None
    if wanted and (save_due or _due(state.step, config.checkpoint.every_steps)):
        with training.throughput.excluded():
            heartbeat.phase("save", state.step, collective=True)
            training.save(state)
    elif wanted and _due(state.step, config.checkpoint.ram_every_steps):
        with training.throughput.excluded():
            heartbeat.phase("save", state.step, collective=True)
            training.copy_to_memory(state)
    else:
        training.saver.poll()


def _due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0


def _read_step(training: Training, state: TrainingState) -> tuple[TrainingState, StepData, Agreement]:
    """The step's micro-batches and what all ranks agree on; a corrupt block that is masked is read around."""
    heartbeat, loader = training.place.heartbeat, training.loader
    while True:
        passing("step.begins")
        heartbeat.phase("data", state.step, own_s=training.own_work.take())
        with training.own_work.waiting():
            data = loader.read(state.step, state.data, functools.partial(heartbeat.phase, "data", state.step))
        # A new shape may have to be compiled, and takes as long as no step before has told.
        known = training.shape == state.data.segment.micro_batch_shape
        heartbeat.phase("step" if known else "compile", state.step, collective=True)
        agreed = agree(data, training.place.stop.reason, save_due=training.saver.time_is_up)
        passing("step.agreed")
        if not agreed.newly_corrupt:
            return state, data, agreed
        # Only the rank that read a block knows that it is bad: all take it into their state and read again.
        found = {tuple(block) for text in gather_texts(json.dumps(data.corrupt)) for block in json.loads(text)}
        state = replace(state, data=loader.quarantine(state.data, sorted(found)))
        training.place.log.warning("corrupt blocks are masked from here on", blocks=sorted(found), step=state.step)


def _optimize(training: Training, state: TrainingState, data: StepData, agreed: Agreement) -> StepRecord:
    """Forward, backward and optimizer step; what was not finite is computed once more. A collective."""
    record = _compute(training, state, data, agreed)
    if record.outcome.applied or not training.config.health.rerun_suspicious_steps:
        return record
    again = _compute(training, state, data, agreed)
    compare_again(training, state, record, again)
    return again


def _compute(training: Training, state: TrainingState, data: StepData, agreed: Agreement) -> StepRecord:
    watch = training.watch(state)
    total = torch.zeros(3, dtype=torch.float64, device=training.place.device)
    training.engine.begin_step(len(data.batches))
    for batch in data.batches:
        there = batch.to(training.place.device)
        watching = None if watch is None else watch.forward(there)
        sums = training.engine.micro_step(there, global_target_tokens=agreed.target_tokens, watching=watching)
        training.place.heartbeat.phase("step", state.step)
        training.shape = state.data.segment.micro_batch_shape
        passing("step.microstep")
        total += torch.stack(sums)
    config = training.config
    learning_rate = learning_rate_at(state.step, config.optimizer.learning_rate, config.schedule)
    learning_rate *= config.health.rollback_learning_rate_factor**state.health.rollbacks
    passing("step.before_update")
    outcome = training.engine.step(learning_rate)
    passing("step.after_update")
    if watch is not None:
        watch.after_step()
    return StepRecord(agreed, outcome, learning_rate, total, watch)


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
