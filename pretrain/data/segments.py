"""Segments of a run's data: made from a config, compared, and turned into the order of rows and steps. PURE.

Takes config and opened sources -> gives a `Segment`; takes segments -> gives `RowOrder` and `Span`s of steps.

Invariants: a later segment goes on where the earlier ones left each source in each lane, so a change of
weights or batch size neither loses nor repeats a row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from pretrain.config.schema import RunConfig
from pretrain.data.order import RowOrder, SourceShape
from pretrain.data.permutation import I64
from pretrain.data.rows import SourceRows
from pretrain.data.state import DataState, Segment, SegmentSource
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
    """Accepts a segment that reads the other's sources, and maybe new ones, in the same layout; weights and batch size
    may differ.

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
    for name in sorted(old_hashes):
        old_hash, new_hash = old_hashes[name], new_hashes.get(name)
        if old_hash != new_hash:
            what = "is gone" if new_hash is None else "holds other data"
            raise DataError(
                f"data.sources.{name} {what} (manifest {new_hash and new_hash[:12]}, in the checkpoint "
                f"{old_hash[:12]}). A run goes on with exactly the data that it began with, so that no row is lost or "
                "repeated; new sources may be added, and a stage of data.stages may leave one out. Restore the source, "
                "or start a new run."
            )


@functools.lru_cache(maxsize=32)
def order_of(segments: tuple[Segment, ...], seed: int) -> RowOrder:
    """The order of the rows of the last segment.

    Raises:
        DataError: lanes or weights that do not fit the sources.
    """
    segment = segments[-1]
    consumed = consumed_before(segments[:-1], seed, segment.first_row)
    shapes = [SourceShape(s.name, s.num_blocks, s.rows_per_block, s.weight) for s in segment.sources]
    return RowOrder(shapes, seed, segment.lanes, segment.window_blocks, segment.first_row, consumed)


def consumed_before(segments: tuple[Segment, ...], seed: int, row: int) -> dict[str, I64]:
    """Rows of each source that each lane [L] took before the global row `row` of the last segment; sources that rest
    included."""
    if not segments:
        return {}
    earlier = consumed_before(segments[:-1], seed, segments[-1].first_row)
    return {**earlier, **order_of(segments, seed).consumed(row)}


class Span(NamedTuple):
    """Steps of one batch size over rows without a gap; the last one is open (`num_steps` None)."""

    first_step: int
    first_row: int
    num_steps: int | None
    global_batch_size: int


def step_spans(state: DataState) -> list[Span]:
    """Which rows belong to which steps, past and (without further changes) to come."""
    spans: list[Span] = []
    step = 0
    for number, segment in enumerate(state.segments):
        last = number + 1 == len(state.segments)
        end = None if last else state.segments[number + 1].first_row
        row, size = segment.first_row, segment.global_batch_size
        for skip in state.skips:
            if row <= skip.first_row and (end is None or skip.first_row < end):
                steps = (skip.first_row - row) // size
                spans.append(Span(step, row, steps, size))
                step, row = step + steps, skip.end_row
            elif skip.first_row <= row < skip.end_row:
                row = skip.end_row
        steps_left = None if end is None else max(end - row, 0) // size
        spans.append(Span(step, row, steps_left, size))
        step += steps_left or 0
    return [span for span in spans if span.num_steps != 0]
