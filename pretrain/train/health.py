"""What is judged about each step of a run, and what follows from it. PURE.

takes → the numbers of a step, equal on all ranks, and what was seen before (inside the training state) → a
`Finding`: go on, or go back to a checkpoint and, the second time, jump over the rows. Everything follows from the
state and the step, so that ranks decide alike and a killed run decides again as it did.

A step is bad when its loss or gradient was not finite (then nothing was applied), or when one of them lies more than
`spike_z_score` robust deviations above the median of the last good steps. Source: own; the modified z-score of
Iglewicz and Hoaglin 1993 (median, MAD / 0.6745).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pretrain.config.schema import HealthConfig

_MAD_TO_SIGMA = 1.4826
_LEAST_SCALE = 0.01  # of the median: a plateau without noise must not make a spike of its first ripple


@dataclass(frozen=True, slots=True)
class BadStep:
    """Where something went wrong: the step that begins at `row`, with the bits that it gave."""

    step: int
    row: int
    loss: float | None
    gradient_norm: float | None


@dataclass(frozen=True, slots=True)
class HealthState:
    """What judging needs of the past; part of the training state, equal on every rank.

    Attributes:
        losses, gradient_norms: of the last good steps, oldest first, at most `health.spike_window_steps`.
        first_skipped: where the present row of steps that were not applied began.
        suspect: the spike that is being computed again, to tell a fault of the hardware from one of the data.
        rollbacks: how often rows were jumped over.
    """

    losses: tuple[float, ...] = ()
    gradient_norms: tuple[float, ...] = ()
    first_skipped: BadStep | None = None
    suspect: BadStep | None = None
    rollbacks: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> HealthState:
        def bad(entry: Mapping[str, Any] | None) -> BadStep | None:
            return None if entry is None else BadStep(**entry)

        return cls(
            tuple(body["losses"]), tuple(body["gradient_norms"]), bad(body["first_skipped"]), bad(body["suspect"]),
            int(body["rollbacks"]),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """A step as it ended, the same on every rank.

    Attributes:
        step: number of the step, from 0; `row` is where its rows begin and `end_row` where they end.
        loss: per target token; None where it was not reduced or there were no targets.
        gradient_norm: before clipping; infinite when it was not applied.
    """

    step: int
    row: int
    end_row: int
    loss: float | None
    gradient_norm: float
    applied: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """What is to be done after a step.

    Attributes:
        state: to go on with when there is no `back_to`.
        back_to: restore the newest checkpoint of at most this step.
        skip: rows to jump over from then on; None when the step is only computed again.
        suspect: the spike that is computed again.
        why: in words, of what was bad.
        verdict: of a repetition that has just ended: `data` or `hardware`.
    """

    state: HealthState
    back_to: int | None = None
    skip: tuple[int, int] | None = None
    suspect: BadStep | None = None
    why: str = ""
    verdict: str = ""


def judge(config: HealthConfig, before: HealthState, measured: Measured) -> Finding:
    """Judges a finished step."""
    if not measured.applied:
        return _judge_skipped(config, before, measured)
    why = find_spike(config, before, measured)
    repeated = before.suspect is not None and before.suspect.step == measured.step
    if why:
        rows = (measured.row, measured.end_row)
        if repeated or not config.rerun_suspicious_steps:
            return Finding(before, measured.step, rows, why=why, verdict="data" if repeated else "")
        bad = BadStep(measured.step, measured.row, _finite(measured.loss), _finite(measured.gradient_norm))
        return Finding(before, measured.step, suspect=bad, why=why)
    healthy = replace(before, first_skipped=None, suspect=None if repeated else before.suspect)
    return Finding(_remember(config, healthy, measured), verdict="hardware" if repeated else "")


def _judge_skipped(config: HealthConfig, before: HealthState, measured: Measured) -> Finding:
    first = before.first_skipped or BadStep(measured.step, measured.row, None, None)
    state = replace(before, first_skipped=first)
    count = measured.step - first.step + 1
    if count <= config.max_skipped_steps:
        return Finding(state)
    why = f"{count} steps in a row had a non-finite loss or gradient"
    return Finding(state, first.step, (first.row, measured.end_row), why=why)


def find_spike(config: HealthConfig, past: HealthState, measured: Measured) -> str:
    """What lies too far above the last good steps; empty when nothing does, or too few are known."""
    limit = config.spike_z_score
    if limit is None:
        return ""
    found = []
    for name, value, known in (
        ("loss", measured.loss, past.losses),
        ("gradient norm", measured.gradient_norm, past.gradient_norms),
    ):
        if value is None or len(known) < max(2, config.spike_window_steps // 2):
            continue
        z = robust_z(value, known)
        if not z <= limit:
            middle = statistics.median(known)
            found.append(
                f"{name} {value:.6g} is {z:.3g} deviations above {middle:.6g}, the median of {len(known)} steps"
            )
    return " and ".join(found)


def robust_z(value: float, known: Sequence[float]) -> float:
    """How many robust standard deviations a value lies above the median of others."""
    middle = statistics.median(known)
    deviation = statistics.median([abs(other - middle) for other in known])
    scale = max(_MAD_TO_SIGMA * deviation, _LEAST_SCALE * abs(middle), 1e-30)
    return (value - middle) / scale if math.isfinite(value) else math.inf


def _remember(config: HealthConfig, state: HealthState, measured: Measured) -> HealthState:
    if config.spike_z_score is None or measured.loss is None:
        return state
    window = config.spike_window_steps
    return replace(
        state,
        losses=(*state.losses, measured.loss)[-window:],
        gradient_norms=(*state.gradient_norms, measured.gradient_norm)[-window:],
    )


def _finite(value: float | None) -> float | None:
    """JSON has no other numbers."""
    return value if value is not None and math.isfinite(value) else None
