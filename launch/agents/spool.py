"""Logs of ranks whose run lies in an object store: written to a local file, copied to the store.

Takes local files with their keys → whole copies in the store, a few seconds behind, and complete when
the rank has ended. A store that fails costs a copy, never the run. Own design.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from pretrain.errors import PretrainError
from pretrain.log import Log
from pretrain.store import make_scratch

COPY_EVERY_S = 10.0


class LogSpool:
    """Copies growing files in a thread of its own, so that a slow store never delays the agent.

    `put(url, key, data)` writes one object.
    """

    def __init__(self, put: Callable[[str, str, bytes], None]) -> None:
        self._put = put
        self._folder = make_scratch("logs")
        self._files: dict[Path, tuple[str, str]] = {}
        self._copied: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._copy_forever, name="log-spool", daemon=True)
        self._thread.start()

    def add(self, url: str, key: str) -> Path:
        """A local file that is copied to `key` of the store at `url` from now on, until the spool is closed."""
        log = self._folder / key.replace("/", "-")
        log.touch()
        with self._lock:
            self._files[log] = (url, key)
        return log

    def flush(self) -> None:
        """Copies what has grown soon."""
        self._wake.set()

    def close(self, timeout_s: float = 10.0) -> None:
        """Copies what has grown a last time, removes the local files and ends."""
        self._closed = True
        self._wake.set()
        self._thread.join(timeout_s)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _copy_forever(self) -> None:
        closed = False
        while not closed:
            self._wake.wait(COPY_EVERY_S)
            self._wake.clear()
            closed = self._closed  # read before the files: while the last copies went up, these may have grown
            self._copy_grown()

    def _copy_grown(self) -> None:
        with self._lock:
            files = dict(self._files)
        for log, (url, key) in files.items():
            try:
                data = log.read_bytes()
                if len(data) != self._copied.get(log):
                    self._put(url, key, data)
                    self._copied[log] = len(data)
            except (OSError, PretrainError) as error:
                Log(stream=sys.stderr).warning("a log could not be copied to the store", log=log, error=error)
