"""What happened to a run, one small file per event: `journal/<lease>/<seq>.json`.

Every event names the last event of the leases before that its writer had seen. A reader drops what
an older lease added after that point: a fenced process may still be writing, but no longer counts.
Sequence numbers, not clocks, decide.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pretrain.errors import StoreError
from pretrain.faults import passing
from pretrain.rundir.lease import Lease
from pretrain.rundir.records import encode_record, read_record
from pretrain.store import NotFoundError, Store

_REMEDY = (
    "Restore it from a backup, or delete it: only this record of the history is lost, checkpoints do not depend on it."
)


RESERVE_KEY = "disk-reserve"
RESERVE_BYTES = 64 * 1024


class EventKind(StrEnum):
    """What can happen; the fields that each one carries."""

    CREATED = "created"
    CONFIG_CHANGED = "config_changed"  # changes
    ATTEMPT_STARTED = "attempt_started"  # attempt, ranks, host, why
    RANKS_STARTED = "ranks_started"  # attempt, processes: identities with rank, standby
    RESTORED = "restored"  # attempt, checkpoint, step
    STARTED_FROM = "started_from"  # attempt, checkpoint of another run, taken, left: numbers of parameters, optimizer
    TRAINING = "training"  # attempt, step: its first one is done, stages: seconds of the start of rank 0
    STANDBYS_READY = "standbys_ready"  # attempt, ranks: the next attempt can start from so many warm processes
    COMMITTED = "committed"  # attempt, step, checkpoint, tier, bytes, stall_s, write_s
    SAVE_FAILED = "save_failed"  # attempt, step, checkpoint, message
    STEP_RERUN = "step_rerun"  # attempt, step, verdict: data or hardware, why, ranks: those whose results differed
    ROLLED_BACK = "rolled_back"  # attempt, step, to_step, rows: jumped over from now on, why
    STRAGGLER = "straggler"  # attempt, rank, host, median_s, p90_s, others_median_s: its own work per step
    FAULT = "fault"  # attempt, cause, rank, exit_code, message, report: of a hang, with the stacks of all ranks
    QUARANTINED = "quarantined"  # host, evidence: messages of the faults that were blamed on it
    ATTEMPT_ENDED = "attempt_ended"  # attempt, outcome
    TAKEOVER = "takeover"
    COMPLETED = "completed"  # step; this and the following end a run
    STOPPED = "stopped"  # step
    INTERRUPTED = "interrupted"  # step
    FAILED = "failed"  # reason, exit_code


TERMINAL_KINDS = frozenset({EventKind.COMPLETED, EventKind.STOPPED, EventKind.INTERRUPTED, EventKind.FAILED})


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the journal; `t` is the writer's wall clock in seconds, for people."""

    kind: str
    t: float
    lease: int
    seq: int
    fields: dict[str, Any]


class JournalWriter:
    """Appends under one lease; several threads may share it."""

    def __init__(self, store: Store, lease: Lease) -> None:
        self._store = store
        self._lease = lease
        self._lock = threading.Lock()
        self._seen = {
            str(number): max(seqs) for number, seqs in _numbers(store).items() if number < lease.number and seqs
        }
        self._next = max(_numbers(store).get(lease.number, [0])) + 1
        self._reserve()

    def append(self, kind: str, **fields: Any) -> Event:
        """Adds an event, if the lease still holds.

        Raises:
            FencedError: the run was taken over; nothing is written.
            ValueError: no such kind.
            StoreError: the storage failed.
        """
        event_kind = EventKind(kind)
        with self._lock:
            while True:
                self._lease.check()
                event = Event(event_kind.value, time.time(), self._lease.number, self._next, fields)
                body = {"kind": event.kind, "t": event.t, "lease": event.lease, "seq": event.seq}
                data = encode_record({**body, "fields": fields, "seen": self._seen})
                self._next += 1
                passing("journal.before", event.kind)
                if self._put(event, data):
                    passing("journal.after", event.kind)
                    return event

    def _put(self, event: Event, data: bytes) -> bool:
        """Creates the event's file; for a run's last word on a full disk the reserve is given up."""
        key = _key(event.lease, event.seq)
        try:
            return self._store.put_if_absent(key, data)
        except StoreError:
            if event.kind not in TERMINAL_KINDS or not self._store.exists(RESERVE_KEY):
                raise
            self._store.delete(RESERVE_KEY)
            return self._store.put_if_absent(key, data)

    def _reserve(self) -> None:
        """Space on the disk for the run's last word and the release of its lease."""
        with contextlib.suppress(StoreError):  # no space for it now: then there is none
            if self._store.local_path("") is not None and not self._store.exists(RESERVE_KEY):
                self._store.put(RESERVE_KEY, os.urandom(RESERVE_BYTES))


def read_events(store: Store, *, fenced: bool = False, known: dict[str, dict[str, Any]] | None = None) -> list[Event]:
    """All events in order; those that a fenced writer added too late only with `fenced`.

    Args:
        known: bodies of files that were read before, which never change; what is read now is added to them.

    Raises:
        DamagedFileError: an event does not match its checksum.
    """
    known = {} if known is None else known
    events: list[Event] = []
    for number, seqs in sorted(_numbers(store).items()):
        own: list[Event] = []
        seen: dict[str, int] | None = None
        for seq in seqs:
            key = _key(number, seq)
            if key not in known:
                try:
                    known[key] = read_record(store, key, _REMEDY)
                except NotFoundError:  # deleted between listing and reading
                    continue
            body = known[key]
            own.append(Event(str(body["kind"]), float(body["t"]), number, seq, dict(body["fields"])))
            seen = dict(body["seen"]) if seen is None else seen
        if seen is not None and not fenced:
            events = [event for event in events if event.seq <= seen.get(str(event.lease), 0)]
        events += own
    return events


def _key(lease: int, seq: int) -> str:
    return f"journal/{lease:06d}/{seq:08d}.json"


def _numbers(store: Store) -> dict[int, list[int]]:
    """Sequence numbers of the events of each lease, rising."""
    found: dict[int, list[int]] = {}
    for key in store.list("journal"):
        _, lease, name = key.split("/") if key.count("/") == 2 else ("", "", "")
        stem = name.removesuffix(".json")
        if lease.isdigit() and stem.isdigit():
            found.setdefault(int(lease), []).append(int(stem))
    return {lease: sorted(seqs) for lease, seqs in found.items()}
