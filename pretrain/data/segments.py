"""How a config reads its data, as a segment of the data state, and whether two segments fit each other. PURE.

Takes config and opened sources -> gives a `Segment`; takes two segments -> gives an error or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from pretrain.config.schema import RunConfig
from pretrain.data.rows import SourceRows
from pretrain.data.state import Segment, SegmentSource
from pretrain.errors import DataError


def segment_of(config: RunConfig, sources: Sequence[SourceRows]) -> Segment:
    """The segment in which this config reads from row 0 on."""
    return Segment(
        first_row=0,
        global_batch_size=config.batch.global_batch_size,
        lanes=config.data.lanes,
        window_blocks=config.data.window_blocks,
        sequence_length=config.batch.sequence_length,
        source_length=config.batch.source_length,
        sources=tuple(
            SegmentSource(
                name=source.name,
                manifest_sha256=source.manifest.sha256,
                weight=config.data.sources[source.name].weight,
                num_blocks=source.manifest.blocks,
                rows_per_block=source.rows_per_block,
            )
            for source in sources
        ),
    )


def check_same_data(ours: Segment, theirs: Segment) -> None:
    """Accepts two segments that read the same sources in the same layout; weights and batch size may differ.

    Raises:
        DataError: they do not, named by field.
    """
    for field, name in (
        ("lanes", "data.lanes"),
        ("window_blocks", "data.window_blocks"),
        ("sequence_length", "batch.sequence_length"),
        ("source_length", "batch.source_length"),
    ):
        old, new = getattr(theirs, field), getattr(ours, field)
        if old != new:
            raise DataError(
                f"{name}={new} is not the checkpoint's {old}. It decides the order of rows. Set {name}={old}, or start "
                "a new run."
            )
    old_hashes = {source.name: source.manifest_sha256 for source in theirs.sources}
    new_hashes = {source.name: source.manifest_sha256 for source in ours.sources}
    for name in sorted(old_hashes.keys() | new_hashes.keys()):
        old_hash, new_hash = old_hashes.get(name), new_hashes.get(name)
        if old_hash != new_hash:
            what = "is new" if old_hash is None else "is gone" if new_hash is None else "holds other data"
            raise DataError(
                f"data.sources.{name} {what} (manifest {new_hash and new_hash[:12]}, in the checkpoint "
                f"{old_hash and old_hash[:12]}). A run goes on with exactly the data that it began with, so that no "
                "row is lost or repeated. Restore the source, or start a new run."
            )
