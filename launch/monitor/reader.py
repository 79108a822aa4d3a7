"""A run as its directory tells it, read bit by bit: what was read once is not read again.

Takes a run directory → status, events, ledger, curves' columns. Only reads. Journal files never change,
so each is read once; metrics files only grow, so each look reads what was added; a line that is still
being written waits for its end. Memory: 8 bytes for each number of a record; of a long file only the index is read,
two rows for 128 records, and the records themselves where a picture is zoomed in (`exact`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from launch.monitor.attempts import Attempt, list_attempts
from launch.monitor.checkpoints import checkpoint_problems
from launch.monitor.columns import Columns, RankHistory
from launch.monitor.ledger import Ledger, make_ledger
from pretrain.config import RunConfig
from pretrain.errors import PretrainError, StoreError
from pretrain.metrics.evaluations import read_evaluations
from pretrain.metrics.index import IndexBuilder, columns_of, decode_index, encode_line, index_key, numbers_of
from pretrain.metrics.series import merge_record
from pretrain.rundir import Event, RunDirectory, RunStatus
from pretrain.rundir.journal import TERMINAL_KINDS, read_events
from pretrain.rundir.lease_file import lease_numbers, read_lease
from pretrain.rundir.status import read_status
from pretrain.store import NotFoundError

LIVING = frozenset({"created", "running", "restarting"})
_FILE = re.compile(r"attempt-(\d+)(?:\.jsonl|/\d+\.jsonl)")
_CHUNK_BYTES = 8 << 20
INDEX_FROM_BYTES = 4 << 20  # shorter files are read whole: every point of them is at hand
MOST_EXACT_BLOCKS = 64
# From a clock: a page may outlive this process, and must not take a new one's reader for the one that it knows.
_versions = itertools.count(time.time_ns() // 1_000_000)
_LEDGER_FIELDS = (
    "t",
    "step",
    "loss",
    "step_s",
    "save_stall_s",
    "data_wait_s",
    "validation",
    "validation_s",
    "steps",
    "rollback_s",
)


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
        version: rises whenever something new was read; no other reader ever has the same.
        columns: numbers of the step records by attempt; where `blocks` are known, two rows stand for each of them.
        means: of each block, by attempt.
        sparse: norms and attention by layer, by attempt.
        ranks: own work of every rank, by attempt.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.name = run.name
        self.problem: str | None = None
        self.version = next(_versions)
        self.events: list[Event] = []
        self.columns: dict[int, Columns] = {}
        self.means: dict[int, Columns] = {}
        self.sparse: dict[int, Columns] = {}
        self.ranks: dict[int, RankHistory] = {}
        self.blocks: dict[int, list[dict[str, Any]]] = {}
        self.warnings: list[str] = []
        self.validations: list[ValidationPoint] = []
        self._evaluations: set[str] = set()
        self.status = RunStatus(name=run.name, state="created")
        self.config: RunConfig | None = None
        self._store = run.store
        self._journal: dict[str, dict[str, Any]] = {}  # bodies of its files
        self._config_bytes = b""
        self._offsets: dict[str, int] = {}
        self._partial: dict[str, bytes] = {}
        self._rows: dict[int, list[dict[str, Any]]] = {}
        self._last_seen: dict[int, float] = {}
        self._made: dict[str, _Made] = {}
        self._newest: dict[str, Any] = {}
        self._exact: dict[tuple[int, int, int], Columns] = {}

    def refresh(self) -> None:
        """Reads what is new. Trouble of the storage or a damaged file ends in `problem`, not in an error."""
        try:
            self._read_config()
            events = read_events(self._store, known=self._journal)
            if len(events) != len(self.events):
                self.version = next(_versions)
            self.events = events
            self._read_metrics()
            self._read_evaluations()
            total = self.config.schedule.total_steps if self.config else None
            self.status = read_status(self._store, self.name, total, self._journal)
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

    def of_kind(self, kind: str) -> list[Event]:
        """The journal's events of one kind."""
        return [event for event in self.events if event.kind == kind]

    def checkpoint_problems(self) -> dict[str, str]:
        """Checkpoints that are there by name, with what is wrong with each; nothing is an empty text."""

        def look() -> dict[str, str]:
            try:
                return checkpoint_problems(self.run.checkpoints)
            except PretrainError as error:
                return {str(event.fields.get("checkpoint")): str(error) for event in self.of_kind("committed")}

        return self._kept("checkpoints", look, grows=False)

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

    def last_record(self) -> dict[str, Any]:
        """The newest step record, with the newest of each table."""
        return self._newest

    def exact(self, attempt: int, low: float, high: float) -> Columns | None:
        """The records themselves of steps low to high and a little around; None where they are too many."""
        blocks = self.blocks.get(attempt, [])
        wanted = [n for n, block in enumerate(blocks) if block["last"] >= low and block["first"] <= high]
        if not wanted or len(wanted) > MOST_EXACT_BLOCKS:
            return None
        key = (attempt, wanted[0], wanted[-1])
        if key not in self._exact:
            begin, end = blocks[wanted[0]]["begin"], blocks[wanted[-1]]["end"]
            columns = Columns()
            name = blocks[wanted[0]]["file"]
            with contextlib.suppress(StoreError):
                for record in _records(self._store.get_range(name, begin, end - begin).split(b"\n")):
                    if "loss" in record:
                        columns.add(numbers_of(record))
            self._exact = {**dict(list(self._exact.items())[-3:]), key: columns}
        return self._exact[key]

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
            self.version = next(_versions)

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
                if name not in self._offsets and size > INDEX_FROM_BYTES:
                    self._read_long(name, int(match[1]), size)
                while (offset := self._offsets.get(name, 0)) < size:
                    data = self._store.get_range(name, offset, min(_CHUNK_BYTES, size - offset))
                    self._offsets[name] = offset + len(data)
                    self._take(name, int(match[1]), data)
            except NotFoundError:  # removed since it was listed
                continue

    def _read_evaluations(self) -> None:
        """Measures of checkpoints that were taken beside the training."""
        for key, record in read_evaluations(self._store, self._evaluations).items():
            self._evaluations.add(key)
            self.version = next(_versions)
            for source, values in record.get("validation", {}).items():
                point = ValidationPoint(
                    int(record["attempt"]), record["step"], float(record["t"]), source, dict(values)
                )
                self.validations.append(point)

    def _read_long(self, name: str, attempt: int, size: int) -> None:
        """The index of a long file; what it lacks is made from the lines, and kept where nobody writes it any more."""
        data = b""
        with contextlib.suppress(NotFoundError):
            data = self._store.get(index_key(name))
        lines, used = decode_index(data, size)
        builder = IndexBuilder.after(lines[-1]) if lines else IndexBuilder()
        left: list[dict[str, Any]] = []  # of the block that is not full
        made = []
        while builder.end < size:
            chunk = self._store.get_range(name, builder.end, min(_CHUNK_BYTES, size - builder.end))
            whole, newline, _ = chunk.rpartition(b"\n")
            if not newline:
                break
            for text in whole.split(b"\n"):
                end = builder.end + len(text) + 1
                record = next(_records([text]), None)
                if record is None:
                    builder.end = end
                    continue
                left.append(record)
                line = builder.add(record, end)
                if line is not None:
                    made.append(line)
                    left = []
        for line in [*lines, *made]:
            self._take_block(name, attempt, line)
        filled = [line for line in [*lines, *made] if line["edges"]]
        if filled:
            extremes, means = columns_of(filled)
            self.columns[attempt] = Columns(2 * len(filled), extremes)
            self.means[attempt] = Columns(len(filled), means)
            newest = {field: spread[3] for field, spread in filled[-1]["fields"].items() if "." not in field}
            self._newest = merge_record(self._newest, newest | filled[-1]["edges"][-1])
        for record in left:
            self._add(attempt, record)
        self._offsets[name] = builder.end
        self.version = next(_versions)
        ended = any(event.fields.get("attempt", 0) > attempt or event.kind in TERMINAL_KINDS for event in self.events)
        if made and ended:
            with contextlib.suppress(StoreError):  # a home that cannot be written to is read as well
                self._store.put(index_key(name), data[:used] + b"".join(map(encode_line, made)))

    def _take_block(self, name: str, attempt: int, line: dict[str, Any]) -> None:
        for row in line["ledger"]:
            self._add_row(attempt, row)
        for record in line["sparse"]:
            self._add_sparse(attempt, record)
        if not line["edges"]:
            return
        first, last = line["edges"][0], line["edges"][-1]
        if line["own_s"]:
            self.ranks.setdefault(attempt, RankHistory()).add(last["step"], line["own_s"])
        place = {"file": name, "begin": line["begin"], "end": line["end"], "first": first["step"], "last": last["step"]}
        self.blocks.setdefault(attempt, []).append(place)

    def _take(self, name: str, attempt: int, data: bytes) -> None:
        lines = (self._partial.get(name, b"") + data).split(b"\n")
        self._partial[name] = lines.pop()
        for record in _records(lines):
            self._add(attempt, record)
        self.version = next(_versions)

    def _add(self, attempt: int, record: dict[str, Any]) -> None:
        self._add_row(attempt, record)
        self._newest = merge_record(self._newest, record)
        if "loss" not in record or "validation" in record:
            return
        self.columns.setdefault(attempt, Columns()).add(numbers_of(record))
        if "layers" in record:
            self._add_sparse(attempt, record)
        own = record.get("ranks", {}).get("own_s")
        if own:
            self.ranks.setdefault(attempt, RankHistory()).add(record["step"], own)

    def _add_row(self, attempt: int, record: dict[str, Any]) -> None:
        """What the ledger needs, and validations."""
        self._rows.setdefault(attempt, []).append({name: record[name] for name in _LEDGER_FIELDS if name in record})
        t = float(record.get("t") or 0.0)
        for source, values in record.get("validation", {}).items():
            self.validations.append(ValidationPoint(attempt, record["step"], t, source, dict(values)))

    def _add_sparse(self, attempt: int, record: dict[str, Any]) -> None:
        row: dict[str, Any] = {name: record[name] for name in ("t", "step", "tokens") if name in record}
        for table in ("layers", "attention"):
            for layer, values in record.get(table, {}).items():
                row |= {f"{table}.{layer}.{name}": value for name, value in values.items()}
        self.sparse.setdefault(attempt, Columns()).add(row)
        self._newest = merge_record(self._newest, {n: record[n] for n in ("layers", "attention") if n in record})
        self.warnings = list(record.get("warnings", self.warnings))

    def _forget_metrics(self) -> None:
        """A file became shorter: somebody replaced it, so everything is read again at the next look."""
        self._offsets, self._partial, self._rows = {}, {}, {}
        self.columns, self.means, self.sparse, self.ranks, self.blocks = {}, {}, {}, {}, {}
        self.validations, self._made, self._newest, self._exact, self.warnings = [], {}, {}, {}, []
        self.version = next(_versions)


def _records(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    """The records of whole lines; what is torn is left out."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield record
