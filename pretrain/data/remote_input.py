"""Raw inputs on servers: http(s)://, s3:// and what else fsspec reaches.

Takes URLs -> gives the files behind them, and each as a seekable file. Object stores are read in ranges;
a file over HTTP is fetched first, because many servers ignore ranges without saying so.
Invariants: a failed request is made again with jitter before it is an error; an answer that is
shorter than what was asked for is a failure, never an end.
"""

from __future__ import annotations

import io
import random
import tempfile
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pretrain.errors import DataError, PretrainError, StoreError
from pretrain.store.client import is_absent, is_http, open_url

_BUFFER_BYTES = 8 * 2**20
_RETRY_WAITS_S = (0.2, 1.0, 4.0)
_JITTER = random.Random()  # own: the global generator belongs to whoever seeds it

Answer = TypeVar("Answer")


def expand_remote(url: str, fits: Callable[[str], bool]) -> list[tuple[str, int, str]]:
    """The files behind a URL -> (URL, bytes, version as the server names it), sorted: itself, those of a folder whose
    names fit, or of a glob.

    Names over HTTP are files: servers cannot list, and `?` belongs to the URL.

    Raises:
        UserError: an unknown kind of URL, or its package is missing.
        StoreError: the server failed.
    """
    files, path = open_url(url)
    kind = url.split("://", 1)[0]

    def described(info: dict[str, Any], name: str = "") -> tuple[str, int, str]:
        name = name or info["name"]
        version = next((str(info[key]) for key in ("ETag", "etag", "LastModified", "mtime") if info.get(key)), "")
        return (name if "://" in name else f"{kind}://{name.lstrip('/')}"), int(info.get("size") or 0), version

    def look() -> list[tuple[str, int, str]]:
        try:
            info = files.info(path)
        except FileNotFoundError as error:
            if not is_absent(url, error):
                raise OSError(f"{type(error.__cause__).__name__}: {error.__cause__}") from error
            if is_http(url):
                return []
            found = files.glob(path, detail=True) if any(character in path for character in "*?[") else {}
            return sorted(described(item) for item in found.values() if item["type"] == "file")
        if info["type"] == "file":
            return [described(info, url)]
        below = files.find(path, detail=True)
        return sorted(described(item) for name, item in below.items() if fits(name.rpartition("/")[2]))

    return with_retries(url, look)


class RemoteFile(io.RawIOBase):
    """A remote file by ranges; use `open`."""

    def __init__(self, files: Any, path: str, url: str, size: int) -> None:
        self._files, self._path, self._url, self._size = files, path, url, size
        self._position = 0

    @classmethod
    def open(cls, url: str) -> io.BufferedIOBase:
        """The file, buffered and seekable.

        Raises:
            DataError: it does not exist.
            StoreError: the server failed, also when asked again.
        """
        files, path = open_url(url)
        size = with_retries(url, lambda: files.info(path)).get("size")
        if size is None or is_http(url):
            return with_retries(url, lambda: _fetched(files, path, size))
        return io.BufferedReader(cls(files, path, url, int(size)), _BUFFER_BYTES)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        start, end = self._position, min(self._position + len(buffer), self._size)
        if start >= end:
            return 0

        def ask() -> bytes:
            data = bytes(self._files.cat_file(self._path, start=start, end=end))
            if len(data) != end - start:
                raise OSError(f"{len(data)} of {end - start} bytes came from offset {start}")
            return data

        buffer[: end - start] = with_retries(self._url, ask)
        self._position = end
        return end - start


def with_retries(url: str, ask: Callable[[], Answer]) -> Answer:
    """The answer, asked for up to four times.

    Raises:
        DataError: there is no such file.
        StoreError: every answer was a failure.
    """
    for wait_s in (*_RETRY_WAITS_S, None):
        try:
            return ask()
        except PretrainError:
            raise
        except Exception as error:  # every client library has a family of its own
            if isinstance(error, FileNotFoundError) and is_absent(url, error):
                raise DataError(f"{url} does not exist. Correct the URL.") from None
            if wait_s is None:
                raise StoreError(
                    f"{url} cannot be read: {type(error).__name__}: {error}. Check the network, the credentials and "
                    "the URL."
                ) from None
            time.sleep(wait_s * _JITTER.uniform(0.5, 1.0))
    raise AssertionError("the last try returns or raises")


def _fetched(files: Any, path: str, size: int | None) -> io.BufferedIOBase:
    """A temporary copy; it is gone when it is closed."""
    copy = tempfile.TemporaryFile(prefix="pretrain-input-")  # noqa: SIM115  the caller closes it
    try:
        plain = {"headers": {"Accept-Encoding": "identity"}} if is_http(path) else {}
        with files.open(path, "rb", block_size=0, **plain) as source:
            while piece := source.read(_BUFFER_BYTES):
                copy.write(piece)
        if size is not None and copy.tell() != size:
            raise OSError(f"{copy.tell()} of {size} bytes came")
        copy.seek(0)
    except BaseException:
        copy.close()
        raise
    return copy
