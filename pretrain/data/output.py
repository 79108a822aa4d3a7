"""Where a build writes: OUT appears whole under its name, or not at all, and what is unfinished is kept to go on from.

Takes the name OUT (a directory or a URL) -> gives a store for private files and one for the finished sources.
    OUT.partial/lock, work/, out/    a directory: out/ is renamed to OUT
    OUT.partial/…, OUT/…             an object store: shards lie under OUT at once, manifests come last
A lock on a directory ends with its holder and tells a running build from a dead one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import IO

from pretrain.data.format import MANIFEST_NAME
from pretrain.data.shard_writer import fsync_directory
from pretrain.errors import DataError, StoreError, UserError
from pretrain.store import Store, open_store

BUILD_KEY, REPORT_KEY = "build.json", "report.json"
_LOCK_PATIENCE_S = 3.0
_TEMPORARY = ".tmp-"


class Output:
    """Use as a context manager. Leaving it without `commit` keeps what is done, unless `discard` says otherwise.

    Attributes:
        out: OUT, absolute.
        work, final: stores of private files and of the sources until they are published.
        committed: OUT is there and complete, only the rest of its build was left.
    """

    def __init__(self, out: str | Path, *, work: str | None = None) -> None:
        """
        Args:
            work: another place for private files; for URLs, where a local directory is faster.

        Raises:
            DataError: OUT exists and no unfinished build of it does.
        """
        self.is_remote = "://" in str(out) and not str(out).startswith("file://")
        self.out = str(out).rstrip("/") if self.is_remote else str(Path(str(out).removeprefix("file://")).absolute())
        self._partial = Path(self.out + ".partial")
        self.work: Store = open_store(work or (self.out + ".partial" if self.is_remote else self._partial / "work"))
        self.final: Store = open_store(self.out if self.is_remote else self._partial / "out")
        self._lock: IO[bytes] | None = None
        self._discard = False
        self.committed = False
        if self._exists() and not self.work.exists(BUILD_KEY):
            raise self._refusal()

    def __enter__(self) -> Output:
        """Raises DataError if another build writes OUT, or OUT exists; StoreError if the directory cannot be made."""
        if not self.is_remote:
            self._take_lock()
        if self._exists():
            self.committed = self.work.exists(REPORT_KEY) and self._is_published()
            if not self.committed and not (self.is_remote and self.work.exists(BUILD_KEY)):
                raise self._refusal()
        for store in (self.work, self.final):
            _remove_unfinished_writes(store)
        return self

    def fileno(self) -> int | None:
        """Descriptor of the lock; a process that inherits it keeps the output locked as long as it lives."""
        return None if self._lock is None else self._lock.fileno()

    def commit(self) -> None:
        """Publishes the directory, or ends the build of URLs, whose manifests have published them.

        Raises:
            DataError: OUT has appeared meanwhile.
        """
        if not self.is_remote:
            if os.path.lexists(self.out):
                raise self._refusal()
            fsync_directory(self._partial / "out")
            (self._partial / "out").rename(self.out)
            fsync_directory(Path(self.out).parent)
        self.clean()

    def clean(self) -> None:
        """Removes everything private."""
        self.work.delete_tree("")
        if not self.is_remote:
            shutil.rmtree(self._partial, ignore_errors=True)

    def discard(self) -> None:
        """Nothing is worth going on from."""
        self._discard = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._discard and isinstance(error, DataError | UserError):
            self.clean()
        if self._lock is not None:
            self._lock.close()

    def _exists(self) -> bool:
        return bool(self.final.names()) if self.is_remote else os.path.lexists(self.out)

    def _is_published(self) -> bool:
        """A directory was renamed when it was whole; of an object store the last manifest says so."""
        return not self.is_remote or any(self.final.exists(key) for key in (MANIFEST_NAME, f"train/{MANIFEST_NAME}"))

    def _refusal(self) -> DataError:
        return DataError(f"out={self.out} exists. A source is never changed. Choose another --out or remove it.")

    def _take_lock(self) -> None:
        lock_path = self._partial / "lock"
        try:
            self._partial.mkdir(parents=True, exist_ok=True)
            lock = lock_path.open("ab")
        except OSError as error:
            raise StoreError(f"cannot make {self._partial}: {error.strerror}. Choose another --out.") from error
        if not _take(lock, lock_path):
            lock.close()
            raise DataError(f"out={self.out} is being written by another build. Wait for it, or choose another --out.")
        self._lock = lock


def _remove_unfinished_writes(store: Store) -> None:
    """What a killed writer left half written; no listing of a store shows it."""
    root = store.local_path("")
    if root is not None:
        for folder, _, names in os.walk(root):
            for name in names:
                if name.startswith(_TEMPORARY):
                    Path(folder, name).unlink()


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
