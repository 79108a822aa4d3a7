"""The runs of a home for many page views at once: each is read once, and not more often than it changes.

Takes a home → readers by name, and the list of all runs. A thread reads the list round and round, so
that a page with a thousand runs opens at once and fills up. Memory is bounded: the readers of the
runs that were looked at last are kept, the others forgotten.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from launch.monitor.facts import overview_row
from launch.monitor.reader import LIVING, RunReader
from pretrain.config.schema import NAME_PATTERN
from pretrain.errors import PretrainError, RunError
from pretrain.rundir import RunDirectory, RunStatus
from pretrain.store import Store, open_store

MOST_READERS = 16
READ_AGAIN_S = 0.5
LIVING_EVERY_S = 2.0
ENDED_EVERY_S = 20.0
_NAME = re.compile(NAME_PATTERN)


class RunsView:
    """See the module. For many threads."""

    def __init__(self, home_url: str) -> None:
        self.home: Store = open_store(home_url)
        self._lock = threading.Lock()
        self._readers: OrderedDict[str, tuple[RunReader, threading.Lock, list[float]]] = OrderedDict()
        self._rows: dict[str, tuple[float, dict[str, Any]]] = {}
        self._listed = threading.Event()
        self._closed = threading.Event()
        self._problem: str | None = None
        threading.Thread(target=self._read_forever, name="runs", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    @contextmanager
    def reading(self, name: str) -> Iterator[RunReader]:
        """A run's reader, fresh to half a second, for this thread alone.

        Raises:
            RunError: there is no such run.
        """
        reader, lock, read_at = self._entry(name)
        with lock:
            if time.monotonic() - read_at[0] > READ_AGAIN_S:
                reader.refresh()
                read_at[0] = time.monotonic()
            yield reader

    def overview(self, wait_s: float = 1.0) -> dict[str, Any]:
        """All runs, the newest first; `reading` counts those that have not been read yet."""
        self._listed.wait(wait_s)
        with self._lock:
            rows = [row for _, row in self._rows.values()]
        known = [row for row in rows if row.get("state") != "reading"]
        known.sort(key=lambda row: (row["state"] not in LIVING, -(row.get("updated_at") or 0.0), row["name"]))
        return {
            "home": self.home.url,
            "runs": known,
            "reading": len(rows) - len(known),
            "problem": self._problem,
            "now": time.time(),
        }

    def _entry(self, name: str) -> tuple[RunReader, threading.Lock, list[float]]:
        if not _NAME.fullmatch(name):
            raise RunError(f"run={name!r} is not a run's name. See the list of runs.")
        with self._lock:
            entry = self._readers.get(name)
            if entry is None:
                if not self.home.exists(f"{name}/run.yaml"):
                    raise RunError(f"run={name} does not exist in {self.home.url}. See the list of runs.")
                entry = (RunReader(RunDirectory(self.home.child(name))), threading.Lock(), [-1e9])
                self._readers[name] = entry
            self._readers.move_to_end(name)
            while len(self._readers) > MOST_READERS:
                self._readers.popitem(last=False)
            return entry

    def _read_forever(self) -> None:
        while not self._closed.is_set():
            try:
                self._read_list()
                self._problem = None
            except PretrainError as error:
                self._problem = str(error)
            self._listed.set()
            self._closed.wait(LIVING_EVERY_S / 2)

    def _read_list(self) -> None:
        names = [name for name in self.home.names() if _NAME.fullmatch(name)]
        with self._lock:
            for gone in set(self._rows) - set(names):
                del self._rows[gone]
            for name in names:
                self._rows.setdefault(name, (-1e9, {"name": name, "state": "reading"}))
        began = time.monotonic()
        for name in names:
            if self._closed.is_set():
                return
            read_at, row = self._rows[name]
            every_s = LIVING_EVERY_S if row["state"] in LIVING else ENDED_EVERY_S
            if time.monotonic() - read_at < every_s:
                continue
            fresh = self._read_row(name)
            with self._lock:
                if fresh is None:
                    del self._rows[name]  # a folder that is no run
                else:
                    self._rows[name] = (time.monotonic(), fresh)
            if time.monotonic() - began > 0.5:
                self._listed.set()

    def _read_row(self, name: str) -> dict[str, Any] | None:
        store = self.home.child(name)
        try:
            if not store.exists("run.yaml"):
                return None
            return overview_row(RunDirectory(store).status(), store)
        except PretrainError as error:
            return overview_row(RunStatus(name=name, state="damaged", reason=str(error)), store)
