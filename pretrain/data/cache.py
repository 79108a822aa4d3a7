"""A disk cache of blocks that were fetched from remote sources, shared by the ranks of a node.

Takes (content address, bytes) -> gives the bytes back, or None.

Invariants: names are content addresses, so a stale entry is impossible; entries appear whole (rename);
what comes back is checked by the reader's crc32, a damaged entry is dropped and fetched again; the
cache never fails a run: when the disk is full it stops caching and says so once. The least recently
used entries go when the budget is exceeded.
"""

from __future__ import annotations

import os
import time
import uuid
from contextlib import suppress
from pathlib import Path

from pretrain.log import Log

_SUFFIX = ".block"
_ABANDONED_S = 600.0
_TRIM_TO = 0.9  # of the budget, so that not every put has to look at the whole directory


class BlockCache:
    """Files of one directory, at most `budget_bytes` of them (checked each time 1/20 of it was written)."""

    def __init__(self, directory: str | Path, budget_bytes: int, log: Log | None = None) -> None:
        self._directory = Path(directory)
        self._budget_bytes = budget_bytes
        self._written_bytes = budget_bytes  # the first put looks at what earlier runs left
        self._log = log or Log()
        self._enabled = True

    def get(self, key: str) -> bytes | None:
        path = self._path(key)
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        return data

    def has(self, key: str) -> bool:
        return self._path(key).exists()

    def put(self, key: str, data: bytes) -> None:
        """Keeps a copy, unless the disk will not take it."""
        if not self._enabled or len(data) > self._budget_bytes:
            return
        path = self._path(key)
        temporary = path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            temporary.replace(path)
        except OSError as error:
            self._enabled = False
            self._log.warning(f"data.cache={self._directory} takes no more blocks, going on without it", cause=error)
            with suppress(OSError):
                temporary.unlink()
            return
        self._written_bytes += len(data)
        if self._written_bytes >= self._budget_bytes // 20:
            self._written_bytes = 0
            self._trim()

    def discard(self, key: str) -> None:
        with suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self._directory / key[:2] / (key + _SUFFIX)

    def _trim(self) -> None:
        """Removes the least recently used entries; other ranks may do the same at the same time."""
        entries = []
        for path in self._directory.glob(f"*/*{_SUFFIX}*"):
            with suppress(OSError):
                status = path.stat()
                if path.suffix == _SUFFIX:
                    entries.append((status.st_mtime_ns, status.st_size, path))
                elif time.time() - status.st_mtime > _ABANDONED_S:
                    path.unlink()  # half-written by a process that was killed; a younger one is being written
        total = sum(size for _, size, _ in entries)
        if total <= self._budget_bytes:
            return
        for _, size, path in sorted(entries):
            with suppress(OSError):
                path.unlink()
            total -= size
            if total <= self._budget_bytes * _TRIM_TO:
                return
