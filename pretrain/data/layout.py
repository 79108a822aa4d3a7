"""The last stages of a build, which a repack has too: rows of whole documents, shards, manifests.

Takes the parts of each split and a `Layout` -> gives the finished manifests; shards lie in the output's store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pretrain.data.build_stages import StageRunner
from pretrain.data.format import INDEX_SUFFIX, MANIFEST_NAME, Manifest
from pretrain.data.packing import WINDOW_DOCUMENTS
from pretrain.data.part import PartList
from pretrain.data.progress import ProgressTeller
from pretrain.data.shard_entries import ShardEntry
from pretrain.data.shard_writer import summed_manifest
from pretrain.data.stage_pack import row_limits
from pretrain.errors import DataError
from pretrain.store import Store


@dataclass(frozen=True, slots=True)
class Layout:
    """
    Attributes:
        headers: by split, the manifest without counts; `dropped` counts documents that are missing from the parts.
        folders: of each split below the output.
        over_long, shard_blocks: as in `BuildOptions`.
    """

    headers: Mapping[str, Manifest]
    folders: Mapping[str, str]
    over_long: str
    shard_blocks: int


class LayoutStages:
    """Runs pack and write.

    Args:
        work_folders: of both stages, in the work store.
    """

    def __init__(
        self, layout: Layout, work_folders: Mapping[str, str], stages: StageRunner, teller: ProgressTeller
    ) -> None:
        self._layout, self._folders, self._stages, self._teller = layout, work_folders, stages, teller

    def pack(self, parts: Mapping[str, PartList]) -> dict[str, list[dict[str, Any]]]:
        """By split, the tables of rows, window after window.

        Raises:
            DataError: documents are longer than a row and over_long=fail.
        """
        limits = row_limits(next(iter(self._layout.headers.values())))
        windows = [
            (split, window) for split, found in parts.items() for window in range(-(-found.stop // WINDOW_DOCUMENTS))
        ]

        def items() -> list[dict[str, Any]]:
            return [
                {
                    "window": window,
                    "parts": parts[split].of_documents(window * WINDOW_DOCUMENTS, (window + 1) * WINDOW_DOCUMENTS),
                }
                for split, window in windows
            ]

        def common() -> dict[str, Any]:
            return {"limits": limits, "over_long": self._layout.over_long}

        self._teller.phase("pack", None)
        results = self._stages.run("pack", self._folders["pack"], common, items, self._teller.tick, lambda one: None)
        tables: dict[str, list[dict[str, Any]]] = {split: [] for split in parts}
        for (split, _), result in zip(windows, results, strict=True):
            tables[split].append(result)
        if self._layout.over_long == "fail":
            for split, found in tables.items():
                if any(table["dropped"] for table in found):
                    raise over_long_error(self._layout.headers[split], found)
        return tables

    def write(
        self, parts: Mapping[str, PartList], tables: Mapping[str, list[dict[str, Any]]]
    ) -> dict[str, list[dict[str, Any]]]:
        """By split, the manifest's entries of its shards."""
        headers = self._layout.headers
        items = [
            {"split": split, **item}
            for split, found in parts.items()
            for item in (
                self._packed_shards(headers[split], found, tables[split])
                if headers[split].packed
                else self._cut_shards(headers[split], found)
            )
        ]

        def common() -> dict[str, Any]:
            return {
                "headers": {
                    split: {"manifest": _without_shards(header), "folder": self._layout.folders[split]}
                    for split, header in headers.items()
                }
            }

        self._teller.phase("write", None)
        results = self._stages.run(
            "write",
            self._folders["write"],
            common,
            lambda: items,
            self._teller.tick,
            lambda one: self._teller.reuse(one["text_bytes"], one["tokens"] + one["source_tokens"]),
        )
        self._teller.complete()
        entries: dict[str, list[dict[str, Any]]] = {split: [] for split in parts}
        for item, result in zip(items, results, strict=True):
            entries[item["split"]].append(result)
        return entries

    def manifests(
        self, entries: Mapping[str, list[dict[str, Any]]], tables: Mapping[str, list[dict[str, Any]]]
    ) -> dict[str, Manifest]:
        """The finished manifests."""
        finished = {}
        for split, found in entries.items():
            header, packed = self._layout.headers[split], tables.get(split, [])
            header = replace(
                header,
                dropped=header.dropped + sum(table["dropped"] for table in packed),
                shortened=header.shortened + sum(table["shortened"] for table in packed),
            )
            finished[split] = summed_manifest(header, [ShardEntry(**entry) for entry in found])
        return finished

    def _cut_shards(self, header: Manifest, parts: PartList) -> list[dict[str, Any]]:
        per_shard, blocks = self._layout.shard_blocks, -(-parts.tokens // header.block_tokens)
        items = []
        for shard, first in enumerate(range(0, blocks, per_shard)):
            stop = min(first + per_shard, blocks)
            # One token more than the blocks hold: the last one is followed by the next shard's first.
            found, skip = parts.of_tokens(
                first * header.block_tokens, min(stop * header.block_tokens + 1, parts.tokens)
            )
            items.append(
                {
                    "shard": shard,
                    "first_block": first,
                    "blocks": stop - first,
                    "parts": found,
                    "skip_tokens": skip,
                    "last": stop == blocks,
                }
            )
        return items

    def _packed_shards(self, header: Manifest, parts: PartList, tables: list[dict[str, Any]]) -> list[dict[str, Any]]:
        per_block = header.rows_per_block or header.block_tokens // header.row_tokens
        total = sum(table["rows"] for table in tables)
        per_shard, blocks = self._layout.shard_blocks, -(-total // per_block)
        items = []
        for shard, first in enumerate(range(0, blocks, per_shard)):
            stop = min(first + per_shard, blocks)
            low, high = first * per_block, min(stop * per_block, total)
            chosen, windows, before = [], [], 0
            for window, table in enumerate(tables):
                begin, end = max(low - before, 0), min(high - before, table["rows"])
                if begin < end:
                    chosen.append([table["key"], begin, end])
                    windows.append(window)
                before += table["rows"]
            documents = windows[0] * WINDOW_DOCUMENTS, (windows[-1] + 1) * WINDOW_DOCUMENTS
            items.append(
                {
                    "shard": shard,
                    "first_block": first,
                    "blocks": stop - first,
                    "parts": parts.of_documents(*documents),
                    "tables": chosen,
                }
            )
        return items


def _without_shards(header: Manifest) -> dict[str, Any]:
    return {name: value for name, value in header.body().items() if name != "shards"}


def over_long_error(header: Manifest, tables: list[dict[str, Any]]) -> DataError:
    """The error of documents that no row can hold."""
    count = sum(table["dropped"] for table in tables)
    longest = [max(side) for side in zip(*(table["longest"] for table in tables), strict=True)]
    if header.kind == "pairs":
        return DataError(
            f"source_length={header.source_capacity}, target_length={header.target_capacity}: {count:,} pairs fit no "
            f"row (the longest sides: {longest[1]:,} and {longest[0]:,} tokens). Each side with its end token needs a "
            "slot less than its length. Raise --source-length and --target-length, or give --over-long drop or cut."
        )
    return DataError(
        f"row_tokens={header.row_tokens}: {count:,} documents fit no row (the longest has {longest[0]:,} tokens). Rows "
        "hold whole documents. Raise --row-tokens, or give --over-long drop, cut or split."
    )


def publish(final: Store, folders: Mapping[str, str], manifests: Mapping[str, Manifest]) -> None:
    """Writes the manifests when all else is there, training last of all; removes shards of no manifest."""
    expected = set()
    for split, manifest in manifests.items():
        prefix = f"{folders[split]}/" if folders[split] else ""
        expected |= {prefix + shard.name + suffix for shard in manifest.shards for suffix in ("", INDEX_SUFFIX)}
    for key in set(final.list()) - expected:
        final.delete(key)  # of an unfinished build with other options
    for split in reversed(list(manifests)):
        prefix = f"{folders[split]}/" if folders[split] else ""
        final.put(prefix + MANIFEST_NAME, manifests[split].to_json())
