"""The entries of a manifest's shards, of which there may be 10^5. PURE but for the pause.

Takes the values that the JSON holds -> gives `ShardEntry`s.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple


class ShardEntry(NamedTuple):  # a frozen dataclass takes several times as long to make
    """One shard in the manifest. `documents` and `text_bytes` count documents that end in it; `tokens`
    are target tokens for pairs."""

    name: str
    bytes: int
    sha256: str
    index_sha256: str
    blocks: int
    documents: int
    tokens: int
    source_tokens: int
    text_bytes: int


_TYPES = (str, int, str, str, *5 * (int,))
_in_order = itemgetter(*ShardEntry._fields)
_entry: Callable[[tuple[Any, ...]], ShardEntry] = partial(tuple.__new__, ShardEntry)  # `_make` is a call in Python


def shard_entries(found: object) -> tuple[ShardEntry, ...] | None:
    """The entries that the JSON holds; None if one of them lacks a field, or has another one or one of another type."""
    if not isinstance(found, list):
        return None
    try:
        entries = tuple(map(_entry, map(_in_order, found)))
    except (TypeError, KeyError):
        return None
    if not set(map(len, found)) <= {len(_TYPES)}:
        return None
    columns = zip(_TYPES, zip(*entries, strict=True), strict=False)  # no entries give no column
    return entries if all(set(map(type, column)) == {kind} for kind, column in columns) else None


@contextmanager
def collector_paused() -> Iterator[None]:
    """Else the collector looks at the entries of 10^5 shards again and again while they are made: half the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
