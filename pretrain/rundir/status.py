"""How a run stands, from its journal, lease and metrics; only reads."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pretrain.rundir.journal import Event, EventKind, read_events
from pretrain.rundir.lease_file import LeaseRecord, is_held, newest_lease
from pretrain.rundir.submission import Submission, read_submission
from pretrain.store import NotFoundError, Store

RunState = Literal[
    "created", "running", "restarting", "stopped", "completed", "failed", "interrupted", "lost", "damaged"
]
_TAIL_BYTES = 65536
_AFTER: dict[str, RunState] = {
    EventKind.CREATED: "created",
    EventKind.ATTEMPT_STARTED: "running",
    EventKind.RANKS_STARTED: "running",
    EventKind.RESTORED: "running",
    EventKind.COMMITTED: "running",
    EventKind.FAULT: "restarting",
    EventKind.ATTEMPT_ENDED: "restarting",
    EventKind.COMPLETED: "completed",
    EventKind.STOPPED: "stopped",
    EventKind.INTERRUPTED: "interrupted",
    EventKind.FAILED: "failed",
}


@dataclass(frozen=True, slots=True)
class RunStatus:
    """How a run stands.

    Attributes:
        name: the run's name.
        state: created (never trained), running, restarting (between two attempts, or submitted and its
            driver has not begun), stopped (on request), completed, failed (gave up), interrupted (saved on a
            signal), lost (its process died without a word; resumable), damaged (a file of it cannot be
            trusted; see reason).
        step: optimizer steps done.
        total_steps: optimizer steps of the whole run; None if its config cannot be read.
        attempt: number of the last attempt, 0 before the first.
        loss: training loss of the last logged step, nats per target token.
        tokens_per_second: of the last logged step.
        last_checkpoint: name of the last committed checkpoint.
        updated_at: seconds since 1970 of the last sign of life.
        reason: why it is in this state, where there is a why.
    """

    name: str
    state: RunState
    step: int = 0
    total_steps: int | None = None
    attempt: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    last_checkpoint: str | None = None
    updated_at: float | None = None
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_status(
    store: Store, name: str, total_steps: int | None, known: dict[str, dict[str, Any]] | None = None
) -> RunStatus:
    """The status of a run's directory; `known` as in `read_events`. Raises DamagedFileError or StoreError."""
    waiting = read_submission(store)  # before the lease, which makes it past
    lease = newest_lease(store)  # before the journal: a holder that ends in between leaves its last event first
    if waiting is not None and lease is not None and lease.number > waiting.lease:
        waiting = None
    events = read_events(store, known=known)
    attempt = max((int(event.fields.get("attempt", 0)) for event in events), default=0)
    record = last_record(store, metrics_key(attempt)) if attempt else {}
    state, reason = _state(events, lease, waiting)
    times = [event.t for event in events[-1:]] + ([lease.renewed_at] if lease else [])
    times += [waiting.t] if waiting else []
    times += [float(record["t"])] if isinstance(record.get("t"), int | float) else []
    return RunStatus(
        name=name,
        state=state,
        step=_step(events, attempt, record),
        total_steps=total_steps,
        attempt=attempt,
        loss=_number(record.get("loss")),
        tokens_per_second=_number(record.get("tokens_per_second")),
        last_checkpoint=_last(events, EventKind.COMMITTED, "checkpoint"),
        updated_at=max(times, default=None),
        reason=reason,
    )


def metrics_key(attempt: int) -> str:
    return f"metrics/attempt-{attempt:03d}.jsonl"


def last_record(store: Store, key: str) -> dict[str, Any]:
    """The last record of a training step in a metrics file; a line cut off by a crash does not count."""
    try:
        size = store.size(key)
        start = max(0, size - _TAIL_BYTES)
        lines = store.get_range(key, start, size - start).split(b"\n")
    except NotFoundError:
        return {}
    for line in reversed(lines[1:] if start else lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "loss" in record and isinstance(record.get("step"), int):
            return record
    return {}


def _state(events: list[Event], lease: LeaseRecord | None, waiting: Submission | None) -> tuple[RunState, str | None]:
    state: RunState = "created"
    reason: str | None = None
    last_lease = 0
    for event in events:
        after = _AFTER.get(event.kind)
        if after is None:
            continue
        state, last_lease = after, event.lease
        if event.kind in (EventKind.FAULT, EventKind.FAILED):
            reason = str(event.fields.get("message") or event.fields.get("reason") or event.fields.get("cause") or "")
        elif after == "running":
            reason = None
    held = lease is not None and is_held(lease, time.time())
    if waiting is not None and not held:
        return ("restarting" if last_lease else "created"), f"Ray job {waiting.job} has not begun to train it"
    if lease is not None and held and lease.number > last_lease:
        return ("restarting" if last_lease else "created"), f"{lease.purpose}, {lease.holder}"
    if state in ("created", "running", "restarting") and lease is not None and not held:
        how = "gave up the lease" if lease.released else "is gone"
        return "lost", f"{lease.holder} {how} without a last word; go on with pretrain resume"
    return state, reason or None


def _step(events: list[Event], attempt: int, record: dict[str, Any]) -> int:
    """Steps done: what the last attempt said last, in its metrics or in the journal."""
    known = [int(record["step"])] if record else []
    for event in reversed(events):
        if isinstance(event.fields.get("step"), int) and (event.fields.get("attempt", attempt) == attempt or not known):
            known.append(event.fields["step"])
            break
    return max(known, default=0)


def _last(events: list[Event], kind: EventKind, field: str) -> str | None:
    found = [event.fields[field] for event in events if event.kind == kind and field in event.fields]
    return str(found[-1]) if found else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
