"""The directory that a build writes: it appears whole under its name, or not at all.

Takes the name OUT -> gives a place OUT.partial to write in, renamed to OUT by `commit`. A lock that ends
with its holder tells a running build from the rest of a dead one, which is removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import IO

from pretrain.data.shard_writer import fsync_directory
from pretrain.errors import DataError, StoreError

_LOCK_PATIENCE_S = 3.0


class OutputDirectory:
    """Use as a context manager; leaving it without `commit` removes what was written."""

    def __init__(self, out: str | Path) -> None:
        """Raises DataError if OUT exists or is a URL."""
        if "://" in str(out):
            raise DataError(f"out={out} is a URL. A build writes to a local directory. Build there, then copy it.")
        self.out = Path(out).absolute()
        self.partial = self.out.with_name(self.out.name + ".partial")
        self.work = self.partial / "work"  # private files, removed before the rename
        self._lock: IO[bytes] | None = None
        self._refuse_existing()

    def __enter__(self) -> OutputDirectory:
        """Raises DataError if another build writes OUT, StoreError if the directory cannot be made."""
        lock_path = self.partial / "lock"
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            lock = lock_path.open("ab")
        except OSError as error:
            raise StoreError(f"cannot make {self.partial}: {error.strerror}. Choose another --out.") from error
        if not _take(lock, lock_path):
            lock.close()
            raise DataError(f"out={self.out} is being written by another build. Wait for it, or choose another --out.")
        self._lock = lock
        for rest in self.partial.iterdir():
            if rest != lock_path:
                shutil.rmtree(rest) if rest.is_dir() else rest.unlink()
        self.work.mkdir()
        return self

    def fileno(self) -> int:
        """Descriptor of the lock; a process that inherits it keeps the output locked as long as it lives."""
        assert self._lock is not None
        return self._lock.fileno()

    def commit(self) -> None:
        """Publishes the directory.

        Raises:
            DataError: OUT has appeared meanwhile.
        """
        shutil.rmtree(self.work)
        self._refuse_existing()
        (self.partial / "lock").unlink()
        fsync_directory(self.partial)
        self.partial.rename(self.out)
        fsync_directory(self.out.parent)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    def _refuse_existing(self) -> None:
        if os.path.lexists(self.out):
            raise DataError(f"out={self.out} exists. A source is never changed. Choose another --out or remove it.")


def _take(lock: IO[bytes], path: Path) -> bool:
    """Whether the lock is ours now. Waits for the workers of a builder that was just killed."""
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat())
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
