"""Shows a run's progress in the terminal: new records of the newest attempt, as lines.

Takes the metrics files of a run directory → lines on stdout. A run directory in an object store is
read less often. Never fatal: what cannot be read now is read later.
"""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from pretrain.errors import StoreError
from pretrain.metrics.history import decode_records
from pretrain.metrics.progress import format_progress
from pretrain.rundir import RunDirectory

LOCAL_EVERY_S = 0.2
REMOTE_EVERY_S = 5.0
LINE_EVERY_S = 1.0  # steps that come faster share a line


class Progress:
    """Call `show` as often as you like; it reads and prints in its own rhythm.

    Attributes:
        after: attempts up to this one were shown when they trained.
    """

    def __init__(self, run: RunDirectory, total_steps: int, stream: TextIO | None = None, *, after: int = 0) -> None:
        self._run, self._total_steps, self.after = run, total_steps, after
        self._stream = stream or sys.stdout
        self._attempt = 0
        self._offset = 0
        self._torn = b""
        self._seen: set[str] = set()
        self._read_t = self._line_t = 0.0
        self._held: dict[str, Any] | None = None  # newest step record that was not shown yet

    def show(self, attempt: int, *, last: bool = False) -> None:
        """Prints what is new of an attempt; `last` prints also what was held back."""
        if attempt <= self.after:
            return
        now = time.monotonic()
        if attempt != self._attempt:
            self._print_held()
            self._attempt, self._offset, self._torn = attempt, 0, b""
        local = self._run.store.local_path(self._run.metrics_key(attempt)) is not None
        if last or now - self._read_t >= (LOCAL_EVERY_S if local else REMOTE_EVERY_S):
            self._read_t = now
            for record in self._new_records(local):
                self._take(record, now)
        if last:
            self._print_held()

    def _take(self, record: dict[str, Any], now: float) -> None:
        if "validation" in record or record.get("applied") is False:
            self._print_held()
            self._print(record)
        elif now - self._line_t >= LINE_EVERY_S:
            self._held = None
            self._print(record)
            self._line_t = now
        else:
            self._held = record

    def _print_held(self) -> None:
        if self._held is not None:
            self._print(self._held)
            self._held = None

    def _print(self, record: dict[str, Any]) -> None:
        print(format_progress(record, self._total_steps), file=self._stream, flush=True)

    def _new_records(self, local: bool) -> list[dict[str, Any]]:
        try:
            data = self._new_bytes() if local else self._new_objects()
        except (StoreError, OSError):
            return []
        *lines, self._torn = (self._torn + data).split(b"\n")
        return decode_records(b"\n".join(lines))

    def _new_bytes(self) -> bytes:
        path = self._run.store.local_path(self._run.metrics_key(self._attempt))
        if path is None or not path.exists():
            return b""
        with path.open("rb") as stream:
            stream.seek(self._offset)
            data = stream.read()
        self._offset += len(data)
        return data

    def _new_objects(self) -> bytes:
        prefix = self._run.metrics_key(self._attempt).removesuffix(".jsonl")
        keys = [key for key in self._run.store.list("metrics") if key.startswith(prefix) and key not in self._seen]
        self._seen.update(keys)
        return b"".join(self._run.store.get(key) for key in keys)
