"""The attempts of a run as the journal and the metrics tell them together. PURE.

Takes events and records → one `Attempt` each, with the windows between its step records, and up to
which step its work was kept: a later attempt that restored an older checkpoint discards what is after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pretrain.rundir import Event, EventKind

_ENDS = frozenset({EventKind.COMPLETED, EventKind.STOPPED, EventKind.INTERRUPTED, EventKind.FAILED})


@dataclass(slots=True)
class Window:
    """The steps that one record tells of: those after the record before it.

    Attributes:
        step: the last of them.
        steps: how many.
        step_s: mean seconds of one, validation and saving excluded.
        validations: (end, seconds) of validations among them.
        redone_fraction: part of the steps that were done again, by a later attempt or after a spike.
        rollback_s: going back to a checkpoint among them.
    """

    end_t: float
    step: int
    steps: int
    step_s: float
    save_stall_s: float
    data_wait_s: float
    validations: list[tuple[float, float]] = field(default_factory=list)
    redone_fraction: float = 0.0
    rollback_s: float = 0.0

    @property
    def train_s(self) -> float:
        return self.steps * self.step_s

    @property
    def validation_s(self) -> float:
        return sum(seconds for _, seconds in self.validations)

    @property
    def length_s(self) -> float:
        return self.train_s + self.save_stall_s + self.validation_s + self.rollback_s

    def begin_t(self, floor: float) -> float:
        """When its first step began, not before `floor`."""
        return max(floor, self.end_t - self.length_s)


@dataclass(slots=True)
class Attempt:
    """One attempt.

    Attributes:
        first: no attempt came before it.
        restored_step: the step that it went on from; 0 from the start.
        kept_step: its steps up to this one are part of the run; None: all of them.
        cause: of its fault, empty if it had none.
        outcome: completed, stopped, interrupted, failed, lost or running.
        lost: it vanished: neither a fault nor an end is in the journal, and another one came after it.
        late_validations: (end, seconds) of validations after its last step record.
        last_commit: (step, t) of its last checkpoint.
        changes: of the config since the attempt before, a line each: `field: old -> new (what a resume does with it)`.
    """

    number: int
    lease: int
    ranks: int
    why: str
    host: str
    started_t: float
    first: bool
    ended_t: float = 0.0
    ended: bool = False
    outcome: str = "running"
    lost: bool = False
    spawned_t: float | None = None
    restored_t: float | None = None
    restored_step: int = 0
    kept_step: int | None = None
    fault_t: float | None = None
    cause: str = ""
    last_commit: tuple[int, float] | None = None
    windows: list[Window] = field(default_factory=list)
    late_validations: list[tuple[float, float]] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)


def list_attempts(
    events: Sequence[Event],
    records: Mapping[int, Sequence[Mapping[str, Any]]],
    last_seen: Mapping[int, float] | None = None,
) -> list[Attempt]:
    """All attempts in order; `last_seen` is the last renewal of each lease."""
    attempts: list[Attempt] = []
    changes: list[str] = []  # a resume tells them before it starts an attempt
    for event in events:
        if event.kind == EventKind.ATTEMPT_STARTED:
            attempts.append(_begin(event, first=not attempts))
            attempts[-1].changes, changes = changes, []
        elif event.kind == EventKind.CONFIG_CHANGED:
            changes = [*changes, *map(str, event.fields.get("changes") or ())]
        elif attempts:
            _take(attempts[-1], event)
    for place, attempt in enumerate(attempts):
        rows = records.get(attempt.number, ())
        steps = [row for row in rows if "loss" in row]
        if attempt.restored_t is None and steps and not attempt.first:
            attempt.restored_step = _likely_restored(attempts[:place], int(steps[0]["step"]))
        _add_windows(attempt, rows)
        if not attempt.ended:
            signs = [attempt.ended_t, *(float(row["t"]) for row in rows[-1:] if "t" in row)]
            attempt.ended_t = max([*signs, (last_seen or {}).get(attempt.lease, 0.0)])
            if place < len(attempts) - 1:
                attempt.ended_t = min(attempt.ended_t, attempts[place + 1].started_t)
                attempt.lost = attempt.fault_t is None
                attempt.ended, attempt.outcome = True, "lost" if attempt.lost else "failed"
    _mark_redone(attempts)
    return attempts


def _begin(event: Event, *, first: bool) -> Attempt:
    fields = event.fields
    return Attempt(
        number=int(fields["attempt"]),
        lease=event.lease,
        ranks=int(fields.get("ranks") or 0),
        why=str(fields.get("why") or ""),
        host=str(fields.get("host") or ""),
        started_t=event.t,
        first=first,
        ended_t=event.t,
    )


def _take(attempt: Attempt, event: Event) -> None:
    """What an event after its start says about the attempt."""
    if event.lease != attempt.lease or event.fields.get("attempt", attempt.number) != attempt.number:
        return
    fields = event.fields
    attempt.ended_t = max(attempt.ended_t, event.t)
    if event.kind == EventKind.RANKS_STARTED:
        attempt.spawned_t = event.t
    elif event.kind == EventKind.RESTORED:
        attempt.restored_t, attempt.restored_step = event.t, int(fields.get("step") or 0)
    elif event.kind == EventKind.COMMITTED:
        attempt.last_commit = (int(fields.get("step") or 0), event.t)
    elif event.kind == EventKind.FAULT:
        attempt.fault_t, attempt.cause = event.t, str(fields.get("cause") or "unknown")
    elif event.kind == EventKind.ATTEMPT_ENDED:
        attempt.ended, attempt.outcome = True, str(fields.get("outcome") or "ended")
    elif event.kind in _ENDS:
        attempt.ended, attempt.outcome = True, event.kind


def _likely_restored(before: Sequence[Attempt], first_step: int) -> int:
    """Where an attempt went on whose word about it was lost: the newest checkpoint before its first record."""
    commits = [attempt.last_commit[0] for attempt in before if attempt.last_commit]
    return max((step for step in commits if step < first_step), default=0)


def _add_windows(attempt: Attempt, rows: Sequence[Mapping[str, Any]]) -> None:
    step, validations = attempt.restored_step, []
    for row in rows:
        if "t" not in row:
            continue
        if "validation" in row:
            validations.append((float(row["t"]), float(row.get("validation_s") or 0.0)))
        elif "loss" in row:
            steps = int(row["steps"]) if "steps" in row else max(0, int(row["step"]) - step)
            _mark_jumped(attempt.windows, int(row["step"]) - steps)
            step = int(row["step"])
            window = Window(
                end_t=float(row["t"]),
                step=step,
                steps=steps,
                step_s=float(row.get("step_s") or 0.0),
                save_stall_s=float(row.get("save_stall_s") or 0.0),
                data_wait_s=steps * float(row.get("data_wait_s") or 0.0),
                validations=validations,
                rollback_s=float(row.get("rollback_s") or 0.0),
            )
            attempt.windows.append(window)
            validations = []
    attempt.late_validations = validations


def _mark_jumped(windows: Sequence[Window], begins: int) -> None:
    """Steps behind `begins` that this very attempt had done already, before it went back to a checkpoint."""
    for window in reversed(windows):
        if window.step <= begins:
            return
        if window.steps:
            redone = min(window.steps, window.step - begins) / window.steps
            window.redone_fraction = max(window.redone_fraction, redone)


def _mark_redone(attempts: Sequence[Attempt]) -> None:
    """Sets how far each attempt's work was kept, from the last to the first."""
    kept: int | None = None
    for attempt in reversed(attempts):
        attempt.kept_step = kept
        for window in attempt.windows:
            if kept is not None and window.steps:
                redone = min(window.steps, max(0, window.step - kept)) / window.steps
                window.redone_fraction = max(window.redone_fraction, redone)
        if attempt.windows or attempt.restored_t is not None:
            kept = attempt.restored_step if kept is None else min(kept, attempt.restored_step)
