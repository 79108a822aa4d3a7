"""Makes the `.idx` of every shard anew from the tar's own headers, and says whether it is the manifest's.

Takes the store of a source whose indexes are lost or damaged -> writes those that come out as the manifest
says, byte for byte. What does not is named and left as it is: an index never describes other data than
the manifest. Memory: one shard.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import Any

import numpy as np

from pretrain.data.checksum import crc32
from pretrain.data.format import INDEX_SUFFIX, Manifest, ShardIndex, read_manifest
from pretrain.data.read_tar import StrictHeader, TarDamage
from pretrain.store import NotFoundError, Store


@dataclass(frozen=True, slots=True)
class ReindexReport:
    """What was found: shards whose index was right, was written, or cannot be made (`problems`, a line each)."""

    url: str
    shards: int
    good: int
    written: tuple[str, ...]
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def reindex_source(store: Store) -> ReindexReport:
    """Reads every shard; writes the indexes that are missing or wrong.

    Raises:
        DataError: the manifest is missing or damaged.
        StoreError: the storage failed.
    """
    manifest = read_manifest(store)
    written, problems = [], []
    for number, entry in enumerate(manifest.shards):
        key = entry.name + INDEX_SUFFIX
        try:
            made = _index_of(store.get(entry.name), manifest, number)
        except NotFoundError:
            problems.append(f"{store.url}/{entry.name} is missing")
            continue
        except (TarDamage, tarfile.TarError, _Unfit) as error:
            problems.append(f"{store.url}/{entry.name} gives no index: {error}")
            continue
        if hashlib.sha256(made).hexdigest() != entry.index_sha256:
            problems.append(
                f"{store.url}/{entry.name} gives an index that is not the manifest's: its content was changed. "
                "`pretrain data verify` names the blocks"
            )
        elif not store.exists(key) or store.get(key) != made:
            store.put(key, made)
            written.append(key)
    good = len(manifest.shards) - len(written) - len(problems)
    return ReindexReport(store.url, len(manifest.shards), good, tuple(written), tuple(problems))


class _Unfit(Exception):
    """A whole tar that is no shard of the manifest."""


def _index_of(data: bytes, manifest: Manifest, number: int) -> bytes:
    """The index that the headers of a shard give. Raises TarDamage, TarError or _Unfit."""
    entry = manifest.shards[number]
    if len(data) != entry.bytes:
        raise _Unfit(f"it holds {len(data)} bytes, the manifest says {entry.bytes}")
    first = sum(shard.blocks for shard in manifest.shards[:number])
    spans = list(_spans(data))
    wanted = [f"{block:08d}.{suffix}" for block in range(first, first + entry.blocks) for suffix in manifest.members]
    for place, name in enumerate(wanted):
        if place >= len(spans) or spans[place][0] != name:
            found = spans[place][0] if place < len(spans) else "the archive's end"
            raise _Unfit(f"member {place} is {found}, the manifest says {name}")
    if len(spans) != len(wanted):
        raise _Unfit(f"it holds {len(spans)} members, the manifest says {len(wanted)}")
    table = np.zeros((entry.blocks, 2 + 3 * len(manifest.members)), dtype=np.int64)
    table[:, 0] = np.arange(first, first + entry.blocks)
    table[:, 2:] = np.array([span[1:] for span in spans], dtype=np.int64).reshape(entry.blocks, -1)
    table[:, 1] = [_real_tokens(data, row, manifest) for row in table.tolist()]
    return ShardIndex(table, manifest.members).to_bytes()


def _spans(data: bytes) -> Iterator[tuple[str, int, int, int]]:
    """Name, offset, length and crc32 of each member."""
    with tarfile.open(fileobj=BytesIO(data), mode="r:", tarinfo=StrictHeader) as archive:
        for info in archive:
            payload = memoryview(data)[info.offset_data : info.offset_data + info.size]
            if len(payload) != info.size:
                raise TarDamage(f"{info.name} is cut off")
            yield info.name, info.offset_data, info.size, crc32(payload)


def _real_tokens(data: bytes, row: list[int], manifest: Manifest) -> int:
    """Tokens before the padding of a block (kind tokens), or target tokens (kind pairs), from its document ends."""
    offset, length = row[-6:-4]  # the last member of ends stands before the JSON
    ends = np.frombuffer(data, dtype="<u4", count=length // 4, offset=offset).astype(np.int64)
    if manifest.kind == "tokens":
        is_last = row[0] == manifest.blocks - 1  # only the last block of a source is padded, behind its last document
        return int(ends[-1]) if is_last and ends.size else manifest.block_tokens
    capacity = manifest.target_capacity
    starts = np.maximum(np.concatenate([[0], ends[:-1]])[: ends.size], (ends - 1) // capacity * capacity)
    return int((ends - starts).sum())
