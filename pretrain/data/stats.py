"""Numbers about a built source: lengths of documents, fill, use of the vocabulary.

Takes the store of a source -> gives `SourceStats`; reads every block through the checking reader.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pretrain.data.blocks import BlockReader, TokenBlock
from pretrain.data.format import Manifest, read_manifest
from pretrain.data.histogram import add_lengths
from pretrain.store import Store

_QUANTILES = {"min": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True, slots=True)
class SourceStats:
    """What a source holds.

    Attributes:
        manifest: its manifest.
        lengths: tokens per document, end token included: min, median, p90, p99, max, mean; by side.
        fill_fraction: real tokens over slots; by side.
        ids_used: distinct ids that occur (both sides together).
        histogram: of lengths, by side; see `histogram`.
        trained_fraction: of the tokens, those that are targets by the source's own word; None where it says nothing.
    """

    manifest: Manifest
    lengths: dict[str, dict[str, float]]
    fill_fraction: dict[str, float]
    ids_used: int
    histogram: dict[str, dict[str, int]]
    trained_fraction: float | None = None

    def to_json(self) -> dict[str, Any]:
        body = self.manifest.body() | {"sha256": self.manifest.sha256, "shards": len(self.manifest.shards)}
        return body | {key: value for key, value in asdict(self).items() if key != "manifest"}


def source_stats(store: Store, progress: Callable[[int], None] | None = None) -> SourceStats:
    """Reads all blocks and counts; `progress` hears the number of blocks done.

    Raises:
        DataError: the source is damaged.
        StoreError: the storage failed.
    """
    manifest = read_manifest(store)
    reader = BlockReader(store, manifest, kept_blocks=1)
    uses = np.zeros(manifest.vocabulary_size, dtype=np.int64)
    lengths: dict[str, list[np.ndarray]] = {}
    carried = trained = 0  # tokens of a document that began in an earlier block; targets
    for number in range(manifest.blocks):
        block = reader.read(number)
        if isinstance(block, TokenBlock):
            if manifest.row_tokens:
                sizes, real = _of_rows(block.ids, block.ends, manifest.row_tokens)
            else:
                sizes = np.diff(block.ends, prepend=0)
                sizes[:1] += carried
                last_end = int(block.ends[-1]) if len(block.ends) else -carried
                carried = block.real_tokens - last_end
                real = block.ids[: block.real_tokens]
            lengths.setdefault("tokens", []).append(sizes)
            if block.trained is not None:
                trained += int(block.trained[:-1].sum())  # none in padding
            uses += np.bincount(real, minlength=len(uses))
        else:
            sides = {
                "source": (block.source_ids, block.source_ends, manifest.source_capacity),
                "target": (block.target_ids, block.target_ends, manifest.target_capacity),
            }
            for side, (ids, ends, capacity) in sides.items():
                sizes, real = _of_rows(ids, ends, capacity)
                lengths.setdefault(side, []).append(sizes)
                uses += np.bincount(real, minlength=len(uses))
        if progress is not None:
            progress(number + 1)
    joined = {side: np.concatenate(parts) for side, parts in lengths.items()}
    return SourceStats(
        manifest=manifest,
        lengths={side: _describe(values) for side, values in joined.items()},
        fill_fraction={side: int(values.sum()) / _slots(manifest, side) for side, values in joined.items()},
        ids_used=int((uses > 0).sum()),
        histogram=_histograms(joined),
        trained_fraction=trained / manifest.tokens if manifest.masked else None,
    )


def _of_rows(ids: np.ndarray, ends: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens of each document, real tokens of the block) of rows with padding behind their documents."""
    starts = np.maximum(np.concatenate([[0], ends[:-1]])[: len(ends)], (ends - 1) // capacity * capacity)
    real = [ids[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    return ends - starts, np.concatenate([*real, ids[:0]])


def _slots(manifest: Manifest, side: str) -> int:
    capacity = {"source": manifest.source_capacity, "target": manifest.target_capacity}
    per_block = manifest.block_tokens if side == "tokens" else manifest.rows_per_block * capacity[side]
    return manifest.blocks * per_block


def _histograms(lengths: dict[str, np.ndarray]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {side: {} for side in lengths}
    for side, values in lengths.items():
        add_lengths(found[side], values)
    return found


def _describe(lengths: np.ndarray) -> dict[str, float]:
    values = {
        name: float(value)
        for name, value in zip(_QUANTILES, np.quantile(lengths, list(_QUANTILES.values())), strict=True)
    }
    return values | {"mean": float(lengths.mean())}
