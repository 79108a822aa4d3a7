"""Where every second since a run was created went. PURE.

Takes the journal's events and the metrics' records → spans that follow each other without gap or
overlap from the first event to the end, so their sum is the wall time by construction. What no record
explains is `unexplained`, never guessed. A step that a later attempt did again is rework.
Measured: t, step, steps, step_s, save_stall_s, rollback_s, validation_s and data_wait_s. Own design.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from launch.monitor.attempts import Attempt, list_attempts
from pretrain.rundir import Event


class Kind(StrEnum):
    """What a second was spent on; in the order in which people ask."""

    TRAINING = "training"  # steps that count
    DATA_WAIT = "data wait"  # such steps waiting for their rows
    VALIDATION = "validation"
    CHECKPOINT = "checkpoint stall"  # the loop stood still for a save
    FIRST_START = "first start"  # from the run's creation to its first step
    RESTART = "restart"  # from noticing that an attempt is over to the next one's first step
    REWORK = "rework"  # steps that were lost and had to be done again, and going back to a checkpoint after a spike
    ENDING = "ending"  # from the last save to the end of the ranks
    IDLE = "idle"  # nobody trained the run
    UNEXPLAINED = "unexplained"  # no record says


PHASES = ("notice", "end", "wait", "spawn", "load", "first step")  # of a start, in order


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds since 1970 from `start` to `end`, of one kind; `phase` is one of PHASES in starts and restarts."""

    start: float
    end: float
    kind: Kind
    attempt: int
    phase: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Restart:
    """What one restart cost.

    Attributes:
        attempt: the one that was started.
        cause: of the fault before it; `resume` after a run that had ended, `lost` after one that vanished.
        phases: seconds by phase.
        rework_s: seconds of steps of earlier attempts that this one had to do again.
    """

    attempt: int
    cause: str
    phases: Mapping[str, float]
    rework_s: float

    @property
    def seconds(self) -> float:
        return sum(self.phases.values()) + self.rework_s


@dataclass(frozen=True, slots=True)
class Ledger:
    """The spans of a run, and what they add up to."""

    spans: tuple[Span, ...] = ()
    restarts: tuple[Restart, ...] = ()
    seconds: Mapping[Kind, float] = field(default_factory=dict)

    @property
    def wall_s(self) -> float:
        return self.spans[-1].end - self.spans[0].start if self.spans else 0.0

    @property
    def goodput(self) -> float | None:
        """Fraction of the wall time that steps which count were computed in."""
        return self.seconds.get(Kind.TRAINING, 0.0) / self.wall_s if self.wall_s > 0 else None

    @property
    def busy_goodput(self) -> float | None:
        """The same without the time in which nobody trained the run."""
        busy = self.wall_s - self.seconds.get(Kind.IDLE, 0.0)
        return self.seconds.get(Kind.TRAINING, 0.0) / busy if busy > 0 else None

    def to_json(self) -> dict[str, Any]:
        return {
            "wall_s": self.wall_s,
            "goodput": self.goodput,
            "goodput_without_idle": self.busy_goodput,
            "seconds": {str(kind): self.seconds.get(kind, 0.0) for kind in Kind},
            "restarts": [
                {
                    "attempt": restart.attempt,
                    "cause": restart.cause,
                    "seconds": restart.seconds,
                    "phases": dict(restart.phases),
                    "rework_s": restart.rework_s,
                }
                for restart in self.restarts
            ],
        }


def make_ledger(
    events: Sequence[Event],
    records: Mapping[int, Sequence[Mapping[str, Any]]],
    *,
    now: float | None = None,
    last_seen: Mapping[int, float] | None = None,
) -> Ledger:
    """The ledger of a run.

    Args:
        events: the journal, in order.
        records: step and validation records by attempt, in the order they were written.
        now: seconds since 1970, of a run that lives; None ends the ledger with the last sign of life.
        last_seen: last renewal of each lease, for the end of a run that vanished without a word.
    """
    if not events:
        return Ledger()
    attempts = list_attempts(events, records, last_seen or {})
    if attempts and not attempts[-1].ended and now is None:
        attempts[-1].lost = attempts[-1].fault_t is None
    writer = _Writer(events[0].t)
    for place, attempt in enumerate(attempts):
        before = attempts[place - 1] if place else None
        _approach(writer, before, attempt, events)
        last = place == len(attempts) - 1
        living = now is not None and last and not attempt.ended and attempt.fault_t is None
        _write_attempt(writer, attempt, now if living else None)
    if now is not None:
        kind = Kind.RESTART if attempts else Kind.FIRST_START
        writer.until(now, kind, attempts[-1].number + 1 if attempts else 1, "wait")
    spans = tuple(span for span in writer.spans if span.seconds > 0)
    seconds = {kind: sum(span.seconds for span in spans if span.kind is kind) for kind in Kind}
    return Ledger(spans, _restarts(attempts, spans, writer.rework_of), seconds)


class _Writer:
    """Spans one after the other; time never goes back, whatever the clocks of several hosts say."""

    def __init__(self, start: float) -> None:
        self.cursor = start
        self.spans: list[Span] = []
        self.rework_of: dict[int, float] = {}  # attempt that did the lost steps -> seconds

    def until(self, end: float, kind: Kind, attempt: int, phase: str = "") -> None:
        if end <= self.cursor:
            return
        if kind is Kind.REWORK:
            self.rework_of[attempt] = self.rework_of.get(attempt, 0.0) + end - self.cursor
        self.spans.append(Span(self.cursor, end, kind, attempt, phase))
        self.cursor = end

    def spend(self, parts: Iterable[tuple[Kind, float]], end: float, attempt: int) -> None:
        """Fills the time up to `end` with parts in order; what they leave over is unexplained."""
        for kind, seconds in parts:
            if seconds > 0:
                self.until(min(end, self.cursor + seconds), kind, attempt)
        self.until(end, Kind.UNEXPLAINED, attempt)


def _approach(writer: _Writer, before: Attempt | None, attempt: Attempt, events: Sequence[Event]) -> None:
    """The time between two attempts (or from the creation to the first)."""
    if before is None:
        writer.until(attempt.started_t, Kind.FIRST_START, attempt.number, "wait")
        return
    if before.lease != attempt.lease:
        # Nobody held the run until the new holder's first word.
        words = [event.t for event in events if event.lease == attempt.lease]
        writer.until(min([attempt.started_t, *words]), Kind.IDLE, before.number)
    writer.until(attempt.started_t, Kind.RESTART, attempt.number, "wait")


def _write_attempt(writer: _Writer, attempt: Attempt, now: float | None) -> None:
    kind = Kind.FIRST_START if attempt.first else Kind.RESTART
    end = now if now is not None else attempt.ended_t
    first = attempt.windows[0] if attempt.windows else None
    ready_t = first.begin_t(floor=attempt.started_t) if first else end
    if first is None and attempt.fault_t is not None:
        ready_t = attempt.fault_t
    for phase, t in (("spawn", attempt.spawned_t), ("load", attempt.restored_t)):
        if t is not None:
            writer.until(min(t, ready_t), kind, attempt.number, phase)
    writer.until(ready_t, kind, attempt.number, "first step" if attempt.restored_t else "load")
    for window in attempt.windows:
        back_s = min(window.rollback_s, max(0.0, window.end_t - writer.cursor))
        writer.until(writer.cursor + back_s, Kind.REWORK, attempt.number)  # restored, after a spike, before these steps
        gap = max(0.0, window.end_t - writer.cursor - window.validation_s)
        train_s = min(window.train_s, gap)
        redone_s = train_s * window.redone_fraction
        wait_s = min(window.data_wait_s, train_s - redone_s)
        # A save may also wait for the one before it, which no stall counts.
        stall_s = gap - train_s if window.save_stall_s > 0 else 0.0
        for t, seconds in window.validations:
            pieces = [(Kind.CHECKPOINT, stall_s), *_work(train_s, redone_s, wait_s)]
            left = max(0.0, t - seconds - writer.cursor)
            taken = _take(pieces, left)
            writer.spend(taken, t - seconds, attempt.number)
            writer.until(t, Kind.VALIDATION, attempt.number)
            stall_s, train_s, redone_s, wait_s = _minus(taken, stall_s, train_s, redone_s, wait_s)
        pieces = [(Kind.CHECKPOINT, stall_s), *_work(train_s, redone_s, wait_s)]
        writer.spend(pieces, window.end_t, attempt.number)
    _write_tail(writer, attempt, end, living=now is not None)


def _work(train_s: float, redone_s: float, wait_s: float) -> list[tuple[Kind, float]]:
    kept_s = max(0.0, train_s - redone_s - wait_s)
    return [(Kind.DATA_WAIT, wait_s), (Kind.TRAINING, kept_s), (Kind.REWORK, redone_s)]


def _take(pieces: list[tuple[Kind, float]], seconds: float) -> list[tuple[Kind, float]]:
    """The first `seconds` of the pieces."""
    taken = []
    for kind, length in pieces:
        part = min(length, seconds)
        seconds -= part
        taken.append((kind, part))
    return taken


def _minus(
    taken: list[tuple[Kind, float]], stall_s: float, train_s: float, redone_s: float, wait_s: float
) -> tuple[float, float, float, float]:
    """What is left of a window's parts when some of each is spent."""
    spent = dict(taken)
    redone, wait = spent.get(Kind.REWORK, 0.0), spent.get(Kind.DATA_WAIT, 0.0)
    train = spent.get(Kind.TRAINING, 0.0) + redone + wait
    return stall_s - spent.get(Kind.CHECKPOINT, 0.0), train_s - train, redone_s - redone, wait_s - wait


def _write_tail(writer: _Writer, attempt: Attempt, end: float, *, living: bool) -> None:
    """From the last record of steps to the end of the attempt."""
    number = attempt.number
    if not attempt.windows:
        writer.until(end, Kind.FIRST_START if attempt.first else Kind.RESTART, number, "load" if living else "end")
        return
    window_s = attempt.windows[-1].length_s
    for t, seconds in attempt.late_validations:
        writer.until(min(t - seconds, writer.cursor + window_s), Kind.TRAINING, number)
        writer.until(t - seconds, Kind.UNEXPLAINED, number)
        writer.until(t, Kind.VALIDATION, number)
    if living:
        # Steps that no record tells of yet; what takes longer than two records is not believed.
        writer.until(min(end, writer.cursor + 2 * window_s), Kind.TRAINING, number)
        writer.until(end, Kind.UNEXPLAINED, number)
    elif attempt.fault_t is not None:
        writer.until(min(attempt.fault_t, writer.cursor + window_s), Kind.REWORK, number)
        writer.until(attempt.fault_t, Kind.RESTART, number + 1, "notice")
        writer.until(end, Kind.RESTART, number + 1, "end")
    elif attempt.lost:
        writer.until(min(end, writer.cursor + window_s), Kind.REWORK, number)
        writer.until(end, Kind.UNEXPLAINED, number)
    else:
        step, t = attempt.last_commit or (0, writer.cursor)
        unrecorded_s = max(0, step - attempt.windows[-1].step) * attempt.windows[-1].step_s
        writer.until(min(t, writer.cursor + unrecorded_s), Kind.TRAINING, number)
        writer.until(t, Kind.CHECKPOINT, number)
        writer.until(end, Kind.ENDING, number)


def _restarts(
    attempts: Sequence[Attempt], spans: Sequence[Span], rework_of: Mapping[int, float]
) -> tuple[Restart, ...]:
    restarts = []
    for before, attempt in itertools.pairwise(attempts):
        phases = dict.fromkeys(PHASES, 0.0)
        for span in spans:
            if span.kind is Kind.RESTART and before.number < span.attempt <= attempt.number:
                phases[span.phase] += span.seconds
        cause = before.cause or ("lost" if before.lost else "resume")
        restarts.append(Restart(attempt.number, cause, phases, rework_of.get(before.number, 0.0)))
    return tuple(restarts)
