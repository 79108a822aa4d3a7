"""Where records go: JSON lines in the run directory always, further sinks by config.

Takes records (see `definitions`) from rank 0 only → one file per attempt, so that two attempts
never write the same file. A record is on disk when `write` returns. A full disk or a broken
network never ends training: lines wait in memory, one warning is given, the next record tries
again.
"""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from pretrain.config.schema import MetricsConfig, RunConfig
from pretrain.errors import StoreError
from pretrain.log import Log
from pretrain.metrics.index import IndexBuilder, encode_line, index_key
from pretrain.store import Store, UnsupportedError
from pretrain.topology import World

_TRACKERS: tuple[tuple[Callable[[MetricsConfig], bool], str], ...] = (
    (lambda metrics: metrics.wandb.mode != "off", "pretrain.metrics.wandb_sink"),
    (lambda metrics: metrics.tensorboard, "pretrain.metrics.tensorboard_sink"),
    (lambda metrics: metrics.trackio.project is not None, "pretrain.metrics.trackio_sink"),
    (lambda metrics: metrics.prometheus.port is not None, "pretrain.metrics.prometheus_sink"),
)
"""When a sink is wanted, and the module whose `open_sink(config, home, attempt, log)` makes it. Imported then only."""

FLUSH_SECONDS = 10.0
FLUSH_RECORDS = 200
MAX_PENDING_LINES = 100_000


@runtime_checkable
class Sink(Protocol):
    """Takes records; `write` neither blocks for long nor raises for its own troubles."""

    def write(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class MetricsHome(Protocol):
    """What a sink needs to know of a run directory."""

    @property
    def store(self) -> Store: ...

    @property
    def name(self) -> str: ...

    @property
    def checkpoints(self) -> Store: ...

    def metrics_key(self, attempt: int) -> str: ...


def open_sinks(
    config: RunConfig, run_directory: MetricsHome, world: World, attempt: int, log: Log | None = None
) -> list[Sink]:
    """The sinks that the config asks for; none on ranks other than 0, so that nothing is recorded twice."""
    if not world.is_main:
        return []
    log = log or Log(world.rank)
    sinks: list[Sink] = [JsonlSink(run_directory.store, run_directory.metrics_key(attempt), log=log)]
    for wanted, module in _TRACKERS:
        if wanted(config.metrics):
            opened = importlib.import_module(module).open_sink(config, run_directory, attempt, log)
            sinks.append(opened)
    return sinks


class JsonlSink:
    """One JSON object per line, appended record by record.

    Where the store cannot append (object stores), lines are gathered and written as numbered
    objects `attempt-003/00000000.jsonl`, every 10 s or 200 records and at the end: a crash there
    loses the lines of the last seconds.
    """

    def __init__(
        self, store: Store, key: str, *, log: Log | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._key = key
        self._log = log or Log()
        self._clock = clock
        self._pending: list[bytes] = []
        self._unindexed: list[tuple[dict[str, Any], int]] = []  # records of pending lines and their bytes
        self._index: IndexBuilder | None = IndexBuilder()  # None: it has lost its place
        self._dropped = 0
        self._can_append = True
        self._torn = False  # the last append failed and may have left half a line
        self._warned = False
        self._chunk = 0
        self._flushed_at = clock()

    def write(self, record: dict[str, Any]) -> None:
        if len(self._pending) < MAX_PENDING_LINES:
            self._pending.append(encode_record(record))
            if self._index is not None:
                self._unindexed.append((record, len(self._pending[-1])))
        else:
            self._dropped += 1
        if self._can_append:
            self._append()
        elif len(self._pending) >= FLUSH_RECORDS or self._clock() - self._flushed_at >= FLUSH_SECONDS:
            self._put_chunk()

    def close(self) -> None:
        if self._pending:
            self._append() if self._can_append else self._put_chunk()
        if self._pending or self._dropped:
            self._log.warning(
                "metrics lost: they could not be written before the end",
                records=len(self._pending) + self._dropped,
                file=self._key,
            )
        self._pending = []

    def _append(self) -> None:
        data = b"".join(self._pending)
        try:
            self._store.append(self._key, b"\n" + data if self._torn else data)
        except UnsupportedError:
            self._can_append, self._index, self._unindexed = False, None, []
            return
        except StoreError as error:
            self._torn, self._index, self._unindexed = True, None, []
            self._warn(error)
            return
        self._pending, self._torn = [], False
        self._write_index()

    def _write_index(self) -> None:
        """Keeps the index beside the lines; whatever goes wrong with it, a reader makes it again."""
        if self._index is None:
            return
        lines = []
        for record, size in self._unindexed:
            line = self._index.add(finite(record), self._index.end + size)
            lines += [] if line is None else [encode_line(line)]
        self._unindexed = []
        if not lines:
            return
        try:
            if self._store.size(self._key) != self._index.end:
                raise StoreError("the file holds more than this attempt has written")
            self._store.append(index_key(self._key), b"".join(lines))
        except StoreError:
            self._index = None

    def _put_chunk(self) -> None:
        self._flushed_at = self._clock()
        try:
            self._store.put(f"{self._key.removesuffix('.jsonl')}/{self._chunk:08d}.jsonl", b"".join(self._pending))
        except StoreError as error:
            self._warn(error)
            return
        self._pending = []
        self._chunk += 1

    def _warn(self, error: StoreError) -> None:
        if not self._warned:
            self._warned = True
            self._log.warning(f"metrics wait in memory because writing failed: {error}")


def encode_record(record: dict[str, Any]) -> bytes:
    """A record as one line of strict JSON: what is not finite becomes null."""
    return json.dumps(finite(record), allow_nan=False, separators=(",", ":")).encode() + b"\n"


def finite(value: Any) -> Any:
    """The same value with every non-finite number replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
