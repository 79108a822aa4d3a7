"""The interface of a store, its errors, and the rule for keys. PURE.

A key is a relative path with forward slashes: no empty part, no `.` or `..`, no part that starts
with `.tmp-` (the names of files that are still being written, which no listing shows).
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from pretrain.errors import StoreError

TEMPORARY = ".tmp-"


class NotFoundError(StoreError):
    """The key does not exist."""


class UnsupportedError(StoreError):
    """This kind of store cannot do what was asked, whatever the key."""


@runtime_checkable
class Store(Protocol):
    """Files by key. Every method raises StoreError (naming store, key and cause) when the storage fails.

    Attributes:
        url: absolute path or URL of the store, without a trailing slash.
    """

    url: str

    def put(self, key: str, data: bytes) -> None:
        """Writes or replaces a file: atomic and durable; after a failure the old content is intact."""

    def put_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        """`put` for content that does not fit into memory; gives the number of bytes written."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Creates a file unless the key exists; of several at once exactly one gets True.

        Raises:
            UnsupportedError: the storage has no atomic creation.
        """

    def get(self, key: str) -> bytes:
        """The whole file. Raises NotFoundError if there is none."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`; fewer is a StoreError, no file a NotFoundError."""

    def size(self, key: str) -> int:
        """Bytes of a file. Raises NotFoundError if there is none."""

    def exists(self, key: str) -> bool:
        """Whether there is a file of this key (a prefix of other keys is none)."""

    def list(self, prefix: str = "") -> builtins.list[str]:
        """All keys below the folder `prefix`, sorted, relative to the store."""

    def names(self, prefix: str = "") -> builtins.list[str]:
        """Names right below the folder `prefix`, files and folders, sorted; one look, no walk."""

    def delete(self, key: str) -> None:
        """Removes a file; nothing happens if there is none."""

    def delete_tree(self, prefix: str, progress: Callable[[], None] = lambda: None) -> None:
        """Removes everything below the folder `prefix`, half-written files too; `progress` is called for each file."""

    def remove_unfinished(self) -> int:
        """Removes what interrupted writes left behind; gives how many. Only while nobody writes here."""

    def append(self, key: str, data: bytes) -> None:
        """Adds to the end of a file in a single write, so that lines of several writers never mix.

        Raises:
            UnsupportedError: on object stores.
        """

    def local_path(self, key: str) -> Path | None:
        """Where a file is for mmap or for a process's output; None when the store is not local."""

    def child(self, prefix: str) -> Store:
        """The store of the keys below the folder `prefix`."""


@runtime_checkable
class ListsSizes(Protocol):
    """A store that may tell the sizes of many files at one look."""

    def sizes(self, prefix: str = "", *, suffix: str = "") -> Mapping[str, int | None] | None:
        """Bytes of each file right below the folder `prefix`, by name; None where the storage cannot list (HTTP).

        Args:
            suffix: files with other names may come with None: where each size costs a look at the file.
        """


@runtime_checkable
class ReadsInto(Protocol):
    """A store that reads into memory which the caller has."""

    def get_range_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        """Fills the buffers of bytes one after the other with what the file holds from `start` on; raises as
        `Store.get_range`, with any content in them."""


def checked_key(key: str, *, empty: bool = False) -> str:
    """The key itself, if it is one; `empty` allows the folder of the whole store.

    Raises:
        StoreError: it could leave the store or name a temporary file.
    """
    if empty and key == "":
        return key
    parts = key.split("/")
    if any(part in ("", ".", "..") or part.startswith(TEMPORARY) or "\0" in part for part in parts):
        raise StoreError(
            f"key={key!r} is no key of a store. A key is a relative path without empty parts, '.', '..' "
            f"and names that start with {TEMPORARY}. Use a name like checkpoints/step-00000010."
        )
    return key
