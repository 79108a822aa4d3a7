"""A store on an object store, through fsspec (`s3://`, `gs://`, `memory://`, …).

One file is one PUT, which object stores make visible whole or not at all. Large ones go up in parts on S3, on
others from a temporary local file, so that an interrupted source never publishes half an object. There
is no append. Atomic creation is a conditional PUT on S3, where a probe shows that the store honours it.
"""

from __future__ import annotations

import builtins
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pretrain.errors import StoreError
from pretrain.faults import passing
from pretrain.store.base import TEMPORARY, NotFoundError, Store, UnsupportedError, checked_key
from pretrain.store.client import is_absent, is_http, open_url
from pretrain.store.local import short_read
from pretrain.store.multipart import abandoned, put_in_parts

_HONOURS_CONDITION: dict[str, bool] = {}  # by bucket, found by a probe


class RemoteStore:
    """See `Store`.

    Raises:
        UserError: nobody knows how to reach a URL of this kind.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._files, root = open_url(self.url)
        self._root = root.rstrip("/")

    def __repr__(self) -> str:
        return f"RemoteStore({self.url!r})"

    # ---------------------------------------------------------------------------------------- writing

    def put(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with self._explained("write", key):
            passing("store.upload", path)
            self._files.pipe_file(path, bytes(data))

    def put_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        path = self._path(key)
        if self._is_s3:
            source = _Source(chunks)
            try:
                with self._explained("write", key):
                    return put_in_parts(self._files, path, source)
            except StoreError:
                if source.error is not None:
                    raise source.error from None
                raise
        with tempfile.NamedTemporaryFile(prefix="pretrain-upload-") as file:
            for chunk in chunks:
                with self._explained("write", key):
                    file.write(chunk)
            with self._explained("write", key):
                file.flush()
                size = file.tell()
                passing("store.upload", path)
                self._files.put_file(file.name, path)
        return size

    def put_if_absent(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        if not self._creates_atomically():
            raise UnsupportedError(
                f"{self.url} cannot create {key} atomically. Exactly one of several writers must win, and this "
                "store does not promise that. Put the run on a shared file system; data may stay here."
            )
        with self._explained("create", key):
            return self._create(path, data)

    def append(self, key: str, data: bytes) -> None:
        checked_key(key)
        raise UnsupportedError(
            f"{self.url} cannot append to {key}. Objects are written whole. Put the run on a shared file system."
        )

    def delete(self, key: str) -> None:
        path = self._path(key)
        if self.exists(key):
            try:
                with self._explained("delete", key):
                    self._files.rm_file(path)
            except NotFoundError:
                return

    def delete_tree(self, prefix: str, progress: Callable[[], None] = lambda: None) -> None:
        for key in self.list(prefix):
            self.delete(key)
            progress()

    def remove_unfinished(self) -> int:
        if not self._is_s3:
            return 0
        with self._explained("clean", "(interrupted uploads)"):
            uploads = list(abandoned(self._files, self._root))
            for upload in uploads:
                self._files.call_s3("abort_multipart_upload", **upload)
        return len(uploads)

    # ---------------------------------------------------------------------------------------- reading

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with self._explained("read", key):
            return bytes(self._files.cat_file(path))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        path = self._path(key)
        if length == 0:
            return b""
        with self._explained("read", key):
            passing("store.download", path)
            data = bytes(self._files.cat_file(path, start=start, end=start + length))
        if len(data) > length:
            raise StoreError(
                f"{self.url}/{key} gave {len(data)} bytes for a range of {length}. The server ignores ranges, which "
                "reading single blocks needs. Use one that honours them, or copy the files to a local directory."
            )
        if len(data) != length:
            raise short_read(f"{self.url}/{key}", start, length, len(data))
        return data

    def size(self, key: str) -> int:
        path = self._path(key)
        with self._explained("read", key):
            info = self._files.info(path)
            if info["type"] != "file":
                raise FileNotFoundError(path)
            return int(info["size"])

    def exists(self, key: str) -> bool:
        path = self._path(key)
        if is_http(self.url):  # fsspec takes any failure for an absence
            try:
                return self.size(key) >= 0
            except NotFoundError:
                return False
        with self._explained("read", key):
            return bool(self._files.isfile(path))

    def list(self, prefix: str = "") -> builtins.list[str]:
        folder = self._folder(prefix)
        with self._explained("list", prefix):
            found = self._files.find(folder)
        return sorted(path[len(self._root) + 1 :] for path in found if path.startswith(folder + "/"))

    def names(self, prefix: str = "") -> builtins.list[str]:
        folder = self._folder(prefix)
        with self._explained("list", prefix):
            try:
                found = self._files.ls(folder, detail=False)
            except FileNotFoundError:
                return []
        paths = (path.rstrip("/") for path in found)
        return sorted({path[len(folder) + 1 :] for path in paths if path.startswith(folder + "/")})

    def sizes(self, prefix: str = "", *, suffix: str = "") -> Mapping[str, int | None] | None:
        if is_http(self.url):
            return None
        folder = self._folder(prefix)
        with self._explained("list", prefix):
            try:
                found = self._files.ls(folder, detail=True)
            except FileNotFoundError:
                return {}
        return {item["name"].rpartition("/")[2]: int(item["size"]) for item in found if item["type"] == "file"}

    def local_path(self, key: str) -> Path | None:
        return None

    def child(self, prefix: str) -> Store:
        prefix = checked_key(prefix.rstrip("/"), empty=True)
        return RemoteStore(f"{self.url}/{prefix}" if prefix else self.url)

    # ---------------------------------------------------------------------------------------- helpers

    @property
    def _is_s3(self) -> bool:
        return self.url.startswith("s3://")

    def _creates_atomically(self) -> bool:
        """Whether the store honours a conditional PUT: asked once by trying, because many ignore the condition."""
        bucket = "/".join(self.url.split("/")[:3])
        if not self._is_s3:
            return False
        if bucket not in _HONOURS_CONDITION:
            path = f"{self._root}/{TEMPORARY}probe-{uuid.uuid4().hex}"
            with self._explained("probe", "for conditional PUT"):
                try:
                    created, again = self._create(path, b"first"), self._create(path, b"second")
                    _HONOURS_CONDITION[bucket] = created and not again and self._files.cat_file(path) == b"first"
                finally:
                    self._files.rm_file(path)
        return _HONOURS_CONDITION[bucket]

    def _create(self, path: str, data: bytes) -> bool:
        """PUT on the condition that there is none. The client may send it twice: a mark tells our own first one."""
        mark = uuid.uuid4().hex
        try:
            self._files.pipe_file(path, bytes(data), mode="create", Metadata={"writer": mark})
        except OSError as error:
            refused = isinstance(error, FileExistsError) or any(
                word in f"{error} {error.__cause__}" for word in ("PreconditionFailed", "ConditionalRequestConflict")
            )
            if not refused:
                raise
            return bool(self._files.metadata(path, refresh=True).get("writer") == mark)
        return True

    def _path(self, key: str) -> str:
        return f"{self._root}/{checked_key(key)}"

    def _folder(self, prefix: str) -> str:
        prefix = checked_key(prefix.rstrip("/"), empty=True)
        return f"{self._root}/{prefix}" if prefix else self._root

    @contextmanager
    def _explained(self, action: str, key: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # every client library of an object store has a family of its own
            if isinstance(error, FileNotFoundError):
                if is_absent(self.url, error):
                    raise NotFoundError(f"{self.url}/{key} does not exist.") from None
                cause = error.__cause__
            else:
                cause = error
            raise StoreError(
                f"cannot {action} {self.url}/{key}: {type(cause).__name__}: {cause}. "
                "Check the network, the credentials and the URL."
            ) from error


class _Source:
    """Pieces, and the error that ended them: it is the caller's, not the store's."""

    def __init__(self, chunks: Iterable[bytes | memoryview]) -> None:
        self._chunks = chunks
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[bytes | memoryview]:
        try:
            yield from self._chunks
        except BaseException as error:
            self.error = error
            raise
