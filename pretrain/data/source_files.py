"""Whether all files of a source are there, as large as its manifest says: before anything is read from it.

Takes (manifest, a way to ask its store) -> nothing, or an error that names what is missing or of another size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from operator import attrgetter, is_not

from pretrain.data.fetch import Fetcher
from pretrain.data.format import INDEX_SUFFIX, SHARD_SUFFIX, Manifest
from pretrain.errors import DataError
from pretrain.store import ListsSizes, NotFoundError

_REMOTE_CHECKS = 16  # parallel ones of a remote source
_name, _bytes = attrgetter("name"), attrgetter("bytes")


def check_sizes(manifest: Manifest, source: str, fetcher: Fetcher, *, with_indexes: bool) -> None:
    """Looks at every shard.

    Args:
        source: its name, for the message.
        with_indexes: also whether the indexes are there, because they are not read yet.

    Raises:
        DataError: files are missing or of a wrong size; all are counted, the first ones named.
        StoreError: the storage failed.
    """
    shards, row_bytes = manifest.shards, 8 * (2 + 3 * len(manifest.members))
    found = _sizes(manifest, fetcher, at_once=with_indexes)
    # Where there are very many, maps are quicker than loops.
    names, sizes = list(map(_name, shards)), list(map(_bytes, shards))
    problems = [] if list(map(found.get, names)) == sizes else _odd_ones(found, names, sizes, absent=None)
    if with_indexes:
        indexes = [name + INDEX_SUFFIX for name in names]
        if any(map(is_not, map(found.get, indexes, repeat(-1)), repeat(None))):
            problems += _odd_ones(found, indexes, [shard.blocks * row_bytes for shard in shards], absent=-1)
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise DataError(
            f"source {source} at {fetcher.store.url} is not whole: {shown}. All {len(shards)} shards have the "
            "sizes that manifest.json names. Copy the source again or rebuild it with `pretrain data build`."
        )


def _sizes(manifest: Manifest, fetcher: Fetcher, *, at_once: bool) -> Mapping[str, int | None]:
    """Bytes of each file that is there: at one look where there are many and the store can. Of many indexes on a
    disk only whether they are there (None): to ask for sizes takes longest of all, and who reads one checks it."""
    store, keys = fetcher.store, [shard.name for shard in manifest.shards]
    if at_once:
        if isinstance(store, ListsSizes):
            listed = fetcher.patiently(lambda: store.sizes(suffix=SHARD_SUFFIX))
            if listed is not None:
                return listed
        keys += [key + INDEX_SUFFIX for key in keys]

    def size_of(key: str) -> int | None:
        try:
            return fetcher.patiently(lambda: store.size(key))
        except NotFoundError:
            return None

    if not fetcher.is_remote:
        sizes = list(map(size_of, keys))
    else:
        with ThreadPoolExecutor(_REMOTE_CHECKS) as pool:
            sizes = list(pool.map(size_of, keys))
    return {key: size for key, size in zip(keys, sizes, strict=True) if size is not None}


def _odd_ones(
    found: Mapping[str, int | None], names: Sequence[str], sizes: Sequence[int], *, absent: int | None
) -> list[str]:
    """What is wrong with each file that is not as large as wanted; a size of None is not known, unless it is what
    `absent` files have."""
    return [
        f"{name} has {found[name]} bytes, not {size}" if name in found else f"{name} is missing"
        for name, size in zip(names, sizes, strict=True)
        if found.get(name, absent) not in ((size,) if absent is None else (size, None))
    ]
