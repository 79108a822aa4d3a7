"""A run as its directory tells it, read bit by bit: what was read once is not read again.

Takes a run directory → status, events, ledger, curves' columns. Only reads. Journal files never change,
so each is read once; metrics files only grow, so each look reads what was added; a line that is still
being written waits for its end. Memory: 8 bytes for each number of a record.
"""

from __future__ import annotations

import json
import math
import re
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from launch.monitor.attempts import Attempt, list_attempts
from launch.monitor.ledger import Ledger, make_ledger
from pretrain.config import RunConfig
from pretrain.errors import PretrainError
from pretrain.rundir import Event, RunDirectory, RunStatus
from pretrain.rundir.journal import read_events
from pretrain.rundir.lease_file import lease_numbers, read_lease
from pretrain.rundir.status import read_status
from pretrain.store import NotFoundError, Store

LIVING = frozenset({"created", "running", "restarting"})
_FILE = re.compile(r"attempt-(\d+)(?:\.jsonl|/\d+\.jsonl)")
_CHUNK_BYTES = 8 << 20
_LEDGER_FIELDS = ("t", "step", "loss", "step_s", "save_stall_s", "data_wait_s", "validation", "validation_s")


class _KeptJournal:
    """A store that reads each journal file once; everything else goes to the store behind it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: dict[str, bytes] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        if not key.startswith("journal/"):
            return self._store.get(key)
        if key not in self._kept:
            self._kept[key] = self._store.get(key)
        return self._kept[key]


@dataclass(slots=True)
class Columns:
    """The step records of one attempt, by field; a value that a record lacks is NaN."""

    length: int = 0
    fields: dict[str, array[float]] = field(default_factory=dict)

    def add(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, int | float):
                column = self.fields.get(name)
                if column is None:
                    column = self.fields[name] = array("d", [math.nan]) * self.length
                column.append(value)
        self.length += 1
        for column in self.fields.values():
            if len(column) < self.length:
                column.append(math.nan)


@dataclass(frozen=True, slots=True)
class ValidationPoint:
    """One source's validation."""

    attempt: int
    step: int
    t: float
    source: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Made:
    """A value that was computed, from what, when and for how long."""

    value: Any
    version: int
    events: int
    grows: bool
    made_at: float
    cost_s: float


class RunReader:
    """See the module. Not for several threads at once.

    Attributes:
        problem: why something of the run could not be read, or None.
        version: rises whenever something new was read.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.name = run.name
        self.problem: str | None = None
        self.version = 0
        self.events: list[Event] = []
        self.columns: dict[int, Columns] = {}
        self.validations: list[ValidationPoint] = []
        self.status = RunStatus(name=run.name, state="created")
        self.config: RunConfig | None = None
        self._store: Any = _KeptJournal(run.store)
        self._config_bytes = b""
        self._offsets: dict[str, int] = {}
        self._partial: dict[str, bytes] = {}
        self._rows: dict[int, list[dict[str, Any]]] = {}
        self._last_seen: dict[int, float] = {}
        self._made: dict[str, _Made] = {}

    def refresh(self) -> None:
        """Reads what is new. Trouble of the storage or a damaged file ends in `problem`, not in an error."""
        try:
            self._read_config()
            events = read_events(self._store)
            if len(events) != len(self.events):
                self.version += 1
            self.events = events
            self._read_metrics()
            total = self.config.schedule.total_steps if self.config else None
            self.status = read_status(self._store, self.name, total)
            self._read_leases()
        except PretrainError as error:
            self.problem = str(error)
            self.status = RunStatus(name=self.name, state="damaged", reason=self.problem)
        else:
            self.problem = None

    @property
    def living(self) -> bool:
        return self.status.state in LIVING

    def ledger(self) -> Ledger:
        """Where the time went; up to now if the run lives."""

        def make() -> Ledger:
            now = time.time() if self.living else None
            return make_ledger(self.events, self._rows, now=now, last_seen=self._last_seen)

        return self._kept("ledger", make, grows=self.living)

    def attempts(self) -> list[Attempt]:
        """The attempts as the journal and the metrics tell them."""
        return self._kept("attempts", lambda: list_attempts(self.events, self._rows, self._last_seen), grows=False)

    def _kept(self, name: str, make: Callable[[], Any], *, grows: bool) -> Any:
        """A value made anew when something was read, but never for more than a tenth of the time.

        What an event changed is made anew at once.
        """
        kept, now = self._made.get(name), time.monotonic()
        if kept is not None:
            old = kept.version != self.version or kept.grows != grows or (grows and now - kept.made_at > 1.0)
            cheap = now - kept.made_at >= 10 * kept.cost_s
            if not old or (not cheap and kept.events == len(self.events) and kept.grows == grows):
                return kept.value
        value = make()
        cost_s = time.monotonic() - now
        self._made[name] = _Made(value, self.version, len(self.events), grows, made_at=now + cost_s, cost_s=cost_s)
        return value

    def last_value(self, name: str) -> float | None:
        """The last known value of a field, of the newest attempt that has one."""
        for attempt in sorted(self.columns, reverse=True):
            for value in reversed(self.columns[attempt].fields.get(name, ())):
                if not math.isnan(value):
                    return float(value)
        return None

    def _read_config(self) -> None:
        data = self._store.get("run.yaml")
        if data != self._config_bytes:
            self.config = self.run.config()
            self._config_bytes = data
            self.version += 1

    def _read_leases(self) -> None:
        numbers = lease_numbers(self._store)
        for number in numbers:
            if number not in self._last_seen or number == numbers[-1]:
                self._last_seen[number] = read_lease(self._store, number).renewed_at

    def _read_metrics(self) -> None:
        for name in sorted(self._store.list("metrics")):
            match = _FILE.fullmatch(name.removeprefix("metrics/"))
            if not match:
                continue
            try:
                size = self._store.size(name)
                if size < self._offsets.get(name, 0):
                    self._forget_metrics()
                    return
                while (offset := self._offsets.get(name, 0)) < size:
                    data = self._store.get_range(name, offset, min(_CHUNK_BYTES, size - offset))
                    self._offsets[name] = offset + len(data)
                    self._take(name, int(match[1]), data)
            except NotFoundError:  # removed since it was listed
                continue

    def _take(self, name: str, attempt: int, data: bytes) -> None:
        lines = (self._partial.get(name, b"") + data).split(b"\n")
        self._partial[name] = lines.pop()
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                self._add(attempt, record)
        self.version += 1

    def _add(self, attempt: int, record: dict[str, Any]) -> None:
        self._rows.setdefault(attempt, []).append({name: record[name] for name in _LEDGER_FIELDS if name in record})
        if "validation" in record:
            t = float(record.get("t") or 0.0)
            for source, values in record["validation"].items():
                self.validations.append(ValidationPoint(attempt, record["step"], t, source, dict(values)))
        elif "loss" in record:
            self.columns.setdefault(attempt, Columns()).add(record)

    def _forget_metrics(self) -> None:
        """A file became shorter: somebody replaced it, so everything is read again at the next look."""
        self._offsets, self._partial, self._rows = {}, {}, {}
        self.columns, self.validations, self._made = {}, [], {}
        self.version += 1
