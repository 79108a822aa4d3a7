"""A store in a local directory (or one that a network file system shows as such).

Takes keys → files. A write goes to a temporary name in the same folder, is synced, renamed, and the
folder synced: a crash leaves the old file or the new one. `put_if_absent` links the finished
temporary file to its name, because O_EXCL alone would show a file that is still empty.
"""

from __future__ import annotations

import builtins
import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from pretrain.errors import StoreError
from pretrain.faults import passing
from pretrain.store.base import TEMPORARY, NotFoundError, Store, UnsupportedError, checked_key
from pretrain.store.direct import FileWriter
from pretrain.store.leftovers import remove_leftovers, temporary_name

_LOOKERS, _MANY_FILES = 2, 1000  # threads that ask for sizes: a network file system answers several at once
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_HINTS = {
    errno.ENOSPC: "The disk is full. Free space or move the run",
    errno.EDQUOT: "The quota is used up. Free space or move the run",
    errno.EFBIG: "The file would exceed the limit of the process or file system. Raise `ulimit -f`",
    errno.EACCES: "This user may not. Change the permissions",
    errno.EPERM: "This user may not. Change the permissions",
    errno.EROFS: "The file system is read-only. Use another directory",
    errno.EMFILE: "Too many open files. Raise `ulimit -n`",
}


class LocalStore:
    """See `Store`. The directory is made at the first write."""

    def __init__(self, root: str | Path) -> None:
        self._root = os.path.abspath(os.path.expanduser(str(root)))
        self.url = self._root

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    # ---------------------------------------------------------------------------------------- writing

    def put(self, key: str, data: bytes) -> None:
        self.put_stream(key, (data,))

    def put_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        path = self._path(key)
        with self._written(key, path, chunks) as (temporary, written), _explained("write", path):
            passing("store.before_rename", path)
            os.replace(temporary, path)
            passing("store.after_rename", path)
            _sync_folder(os.path.dirname(path))
        return written

    def put_if_absent(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        if os.path.lexists(path):
            return False
        with self._written(key, path, (data,)) as (temporary, _), _explained("create", path):
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                raise UnsupportedError(
                    f"{path} cannot be created atomically: its file system has no hard links "
                    f"({os.strerror(error.errno)}). Exactly one of several writers must win. "
                    "Put the run on another file system."
                ) from None
            _sync_folder(os.path.dirname(path))
        return True

    def append(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with _explained("append to", path):
            self._make_folder(os.path.dirname(path))
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                written = os.write(descriptor, data)
            finally:
                os.close(descriptor)
        if written != len(data):
            raise StoreError(
                f"cannot append to {path}: only {written} of {len(data)} bytes were written. "
                "The disk is probably full. Free space or move the run."
            )

    def delete(self, key: str) -> None:
        path = self._path(key)
        with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError), _explained("delete", path):
            os.unlink(path)
            _sync_folder(os.path.dirname(path))

    def delete_tree(self, prefix: str, progress: Callable[[], None] = lambda: None) -> None:
        path = self._folder(prefix)
        with suppress(FileNotFoundError, NotADirectoryError), _explained("delete", path):
            for parent, _, files in os.walk(path):
                for name in files:
                    with suppress(FileNotFoundError):  # the lease of a reader that has just ended
                        os.unlink(os.path.join(parent, name))
                    progress()
            shutil.rmtree(path)
            _sync_folder(os.path.dirname(path))

    def remove_unfinished(self) -> int:
        return len(remove_leftovers(self))

    # ---------------------------------------------------------------------------------------- reading

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with _missing(path), _explained("read", path), open(path, "rb") as file:
            return file.read()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        path = self._path(key)
        with _missing(path), _explained("read", path):
            data = _read_range(path, start, length)
        if len(data) != length:
            raise short_read(path, start, length, len(data))
        return data

    def get_range_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        path, wanted = self._path(key), sum(map(len, buffers))
        try:
            found = _read_into(path, start, buffers)
        except OSError as error:  # only then: the context managers take as long as opening the file
            with _missing(path), _explained("read", path):
                raise error from None
        if found != wanted:
            raise short_read(path, start, wanted, found)

    def size(self, key: str) -> int:
        path = self._path(key)
        with _missing(path), _explained("read", path):
            if os.path.isdir(path):
                raise IsADirectoryError(path)
            return os.stat(path).st_size

    def exists(self, key: str) -> bool:
        return os.path.isfile(self._path(key))

    def list(self, prefix: str = "") -> builtins.list[str]:
        folder = self._folder(prefix)
        keys = []
        with _explained("list", folder):
            for parent, folders, files in os.walk(folder, onerror=_raise_unless_gone):
                folders[:] = [name for name in folders if not name.startswith(TEMPORARY)]
                start = os.path.relpath(parent, self._root)
                start = "" if start == "." else start.replace(os.sep, "/") + "/"
                keys += [start + name for name in files if not name.startswith(TEMPORARY)]
        return sorted(keys)

    def names(self, prefix: str = "") -> builtins.list[str]:
        folder = self._folder(prefix)
        with _explained("list", folder):
            try:
                return sorted(name for name in os.listdir(folder) if not name.startswith(TEMPORARY))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def sizes(self, prefix: str = "", *, suffix: str = "") -> Mapping[str, int | None] | None:
        folder = self._folder(prefix)
        with _explained("list", folder):
            try:
                with os.scandir(folder) as entries:
                    names = [entry.name for entry in entries if not entry.is_dir()]
                looked_at = [name for name in names if name.endswith(suffix)]
                return dict.fromkeys(names) | dict(zip(looked_at, _sizes_of(folder, looked_at), strict=True))
            except (FileNotFoundError, NotADirectoryError):
                return {}

    def local_path(self, key: str) -> Path | None:
        return Path(self._folder(key))

    def child(self, prefix: str) -> Store:
        return LocalStore(self._folder(prefix))

    # ---------------------------------------------------------------------------------------- helpers

    def _path(self, key: str) -> str:
        return os.path.join(self._root, checked_key(key))

    def _folder(self, prefix: str) -> str:
        prefix = checked_key(prefix.rstrip("/"), empty=True)
        return os.path.join(self._root, prefix) if prefix else self._root

    @contextmanager
    def _written(self, key: str, path: str, chunks: Iterable[bytes | memoryview]) -> Iterator[tuple[str, int]]:
        """A synced temporary file with the content, and its size; gone at the end whatever happens."""
        folder, name = os.path.split(path)
        temporary = os.path.join(folder, temporary_name(name))
        try:
            with _explained("write", path):
                passing("store.open", path)
                self._make_folder(folder)
                file = open(temporary, "xb", buffering=0)  # noqa: SIM115 (closed below, inside the same error translation)
            writer = FileWriter(file.fileno())
            with file:
                for chunk in chunks:
                    with _explained("write", path):
                        writer.write(memoryview(chunk).cast("B"))
                        passing("store.mid_write", path)
                with _explained("write", path):
                    passing("store.before_fsync", path)
                    os.fsync(file.fileno())
            yield temporary, writer.written
        finally:
            with suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(temporary)

    def _make_folder(self, folder: str) -> None:
        """Makes the folder and its parents, each entry synced into the one above."""
        if os.path.isdir(folder):
            return
        parent = os.path.dirname(folder)
        self._make_folder(parent)
        with suppress(FileExistsError):
            os.mkdir(folder)
            _sync_folder(parent)
        if not os.path.isdir(folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)


def _read_range(path: str, start: int, length: int) -> bytes:
    """What the file holds of a range; a third of the time of a file object."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.pread(descriptor, length, start)
        while len(data) < length:  # a network file system, or more than 2 GB
            more = os.pread(descriptor, length - len(data), start + len(data))
            if not more:
                break
            data += more
    finally:
        os.close(descriptor)
    return data


def _read_into(path: str, start: int, buffers: Sequence[memoryview]) -> int:
    """Fills the buffers from a file; gives the number of bytes that it held of them."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found, wanted = os.preadv(descriptor, buffers, start), sum(map(len, buffers))
        while found < wanted:  # a network file system, or more than 2 GB
            more = os.preadv(descriptor, _behind(buffers, found), start + found)
            if not more:
                break
            found += more
    finally:
        os.close(descriptor)
    return found


def _behind(buffers: Sequence[memoryview], filled: int) -> Sequence[memoryview]:
    """What is left of buffers whose first bytes are filled."""
    for number, buffer in enumerate(buffers):
        if filled < len(buffer):
            return [buffer[filled:], *buffers[number + 1 :]]
        filled -= len(buffer)
    return []


def short_read(path: str, start: int, wanted: int, found: int) -> StoreError:
    """The error of a file that ends before the range that was asked for."""
    return StoreError(
        f"{path} ends early: {found} of {wanted} bytes at offset {start} could be read. "
        "The file is cut off. Restore it or build it again."
    )


@contextmanager
def _explained(action: str, path: str) -> Iterator[None]:
    """Turns an OSError into a StoreError with path, cause and remedy; absence passes through."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        if action in ("read", "delete"):
            raise
        raise StoreError(f"cannot {action} {path}: {os.strerror(error.errno or 0)}: {error.filename}.") from error
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "Check the file system")
        name = errno.errorcode.get(error.errno or 0, "OSError")
        raise StoreError(f"cannot {action} {path}: {error.strerror} ({name}). {hint}.") from error


@contextmanager
def _missing(path: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"{path} does not exist.") from None
    except IsADirectoryError:
        raise NotFoundError(f"{path} is a directory, where a file is wanted.") from None


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _sync_folder(folder: str) -> None:
    """Makes renames and new entries of a folder durable, where its file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems
            raise
    finally:
        os.close(descriptor)


def _sizes_of(folder: str, names: Sequence[str]) -> list[int]:
    """Bytes of files of a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # names are looked up from here

    def some(first: int) -> list[int]:
        return [os.stat(name, dir_fd=descriptor).st_size for name in names[first : first + share]]

    try:
        share = -(-len(names) // _LOOKERS) if len(names) >= _MANY_FILES else max(len(names), 1)
        starts = range(0, len(names), share)
        if len(starts) < 2:
            return some(0)
        with ThreadPoolExecutor(len(starts)) as pool:
            return [size for sizes in pool.map(some, starts) for size in sizes]
    finally:
        os.close(descriptor)
