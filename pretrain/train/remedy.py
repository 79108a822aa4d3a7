"""What is done about bad steps: compute one again, go back to a checkpoint, jump over rows, or end the run.

takes → a finding of `health.judge`; gives → the training state to go on from. All of it is collective, and every rank
has the same finding. A run that is killed in the middle restores a checkpoint from before, finds the same and does
the same.
"""

from __future__ import annotations

import socket
from dataclasses import replace

from pretrain.engine.distributed import gather_texts
from pretrain.errors import HealthError
from pretrain.faults import passing
from pretrain.train.build import Training
from pretrain.train.health import Finding, Measured, judge
from pretrain.train.records import StepRecord
from pretrain.train.state import TrainingState


def judge_step(training: Training, before: TrainingState, record: StepRecord) -> Finding:
    """Judges the step that was computed from `before`. A collective where spikes are watched for."""
    config = training.config.health
    rows = before.data.step_rows
    loss = record.loss() if config.spike_z_score is not None else None
    measured = Measured(before.step, rows.start, rows.stop, loss, record.outcome.gradient_norm, record.outcome.applied)
    finding = judge(config, before.health, measured)
    if finding.verdict:
        _tell_rerun(training, before.step, finding.verdict, finding.why or "the spike did not come again", [])
    return finding


def compare_again(training: Training, state: TrainingState, first: StepRecord, again: StepRecord) -> None:
    """Tells what the repetition of a step says whose gradient was not finite. A collective."""
    verdict = "hardware" if again.outcome.applied else "data"
    same = [float.hex(value) for value in first.sums.tolist()] == [float.hex(value) for value in again.sums.tolist()]
    places = gather_texts("" if same else socket.gethostname())
    ranks = [f"rank {rank} on {host}" for rank, host in enumerate(places) if host]
    why = "the gradient was not finite" + ("" if verdict == "data" else " and is finite when computed again")
    _tell_rerun(training, state.step, verdict, why, ranks)


def roll_back(training: Training, before: TrainingState, finding: Finding) -> TrainingState:
    """Restores an earlier state; with `skip` its data stream jumps over those rows. A collective.

    Raises:
        HealthError: rows were jumped over often enough, or there is no checkpoint to go back to.
    """
    assert finding.back_to is not None
    config, place = training.config.health, training.place
    if finding.skip and before.health.rollbacks >= config.max_rollbacks:
        raise HealthError(
            f"{finding.why}, up to step {before.step + 1}; rows were jumped over {before.health.rollbacks} times. "
            f"health.max_rollbacks={config.max_rollbacks} allows no more. Lower optimizer.learning_rate, look at the "
            "rows with pretrain data explain, or start again with other settings under another --name."
        )
    place.heartbeat.phase("load", before.step, collective=True)
    passing("health.before_rollback")
    state = training.restore_earlier(finding.back_to)
    if state is None:
        raise HealthError(
            f"{finding.why}, up to step {before.step + 1}, and no checkpoint of step {finding.back_to} or before is "
            "there. A run goes back to a good one and jumps over the rows. Set checkpoint.every_steps lower, lower "
            "optimizer.learning_rate, and start again under another --name."
        )
    if finding.skip is None:
        place.log.warning("computes a suspicious step again", step=before.step + 1, why=finding.why)
        return replace(state, health=replace(state.health, suspect=finding.suspect))
    first, end = finding.skip
    health = replace(state.health, suspect=None, first_skipped=None, rollbacks=state.health.rollbacks + 1)
    told = {"step": before.step + 1, "to_step": state.step, "rows": [first, end], "why": finding.why}
    place.log.warning("went back and jumps over rows", **told)
    place.reporter.event("rolled_back", attempt=place.attempt, **told)
    passing("health.after_rollback")
    return replace(state, data=state.data.with_skip(first, end), health=health)


def _tell_rerun(training: Training, step: int, verdict: str, why: str, ranks: list[str]) -> None:
    place = training.place
    place.log.warning("computed a step again", step=step + 1, verdict=verdict, why=why, ranks=ranks)
    place.reporter.event("step_rerun", attempt=place.attempt, step=step + 1, verdict=verdict, why=why, ranks=ranks)
