"""Segments of a run's data: made from a config, compared, and turned into the order of rows and steps. PURE.

Takes config and opened sources -> gives a `Segment`; takes segments -> gives `RowOrder` and `Span`s of steps.

Invariants: a later segment goes on where the earlier ones left each source in each lane, so a change of
weights, batch size or length neither loses nor repeats a row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from pretrain.config.batches import longest_batch
from pretrain.config.schema import RunConfig
from pretrain.data.order import RowOrder, SourceShape
from pretrain.data.permutation import I64
from pretrain.data.rows import SourceRows
from pretrain.data.state import DataState, Segment, SegmentSource
from pretrain.errors import DataError


def segment_of(config: RunConfig, sources: Sequence[SourceRows], row_tokens: int | None = None) -> Segment:
    """The segment in which this config reads from row 0 on, before its first stage.

    Args:
        row_tokens: of a global row; the longest row of the config if not given.

    Raises:
        DataError: rows of that length do not fit a source.
    """
    row_tokens = row_tokens or longest_batch(config).sequence_length
    return Segment(
        first_row=0,
        global_batch_size=config.batch.global_batch_size,
        micro_batch_size=config.batch.micro_batch_size,
        lanes=config.data.lanes,
        window_blocks=config.data.window_blocks,
        sequence_length=config.batch.sequence_length,
        row_tokens=row_tokens,
        source_length=config.batch.source_length,
        sources=tuple(
            SegmentSource(
                name=source.name,
                manifest_sha256=source.manifest.sha256,
                weight=config.data.sources[source.name].weight,
                num_blocks=source.manifest.blocks,
                rows_per_block=source.manifest.rows_per_block_at(row_tokens),
            )
            for source in sources
        ),
    )


def check_same_data(ours: Segment, theirs: Segment) -> None:
    """Accepts a segment that reads the other's sources, and maybe new ones, in the same layout; weights, batch size and
    length may differ.

    Raises:
        DataError: they do not, named by field.
    """
    for field, name in (
        ("lanes", "data.lanes"),
        ("window_blocks", "data.window_blocks"),
        ("source_length", "batch.source_length"),
    ):
        old, new = getattr(theirs, field), getattr(ours, field)
        if old != new:
            raise DataError(
                f"{name}={new} is not the checkpoint's {old}. It decides the order of rows. Set {name}={old}, or start "
                "a new run."
            )
    if ours.row_tokens != theirs.row_tokens:
        old, new = theirs.row_tokens, ours.row_tokens
        raise DataError(
            f"batch.sequence_length={new} is not the checkpoint's {old}, nor a part of it. Rows are dealt at the "
            "longest length that the run was begun with, and shorter ones are whole parts of them. "
            f"Set it to {old} or a divisor, or start a new run whose data.stages name every length."
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


_DEEPEST = 64


class _Mixture(NamedTuple):
    """What of a segment decides the order of its rows."""

    first_row: int
    lanes: int
    window_blocks: int
    sources: tuple[SegmentSource, ...]


def order_of(segments: tuple[Segment, ...], seed: int) -> RowOrder:
    """The order of the rows of the last segment. One that changes batch or length alone goes on with the order before
    it, so that it cuts the same sequence of rows.

    Raises:
        DataError: lanes or weights that do not fit the sources.
    """
    return _order_of(_mixtures(segments), seed)[0]


def consumed_before(segments: tuple[Segment, ...], seed: int, row: int) -> dict[str, I64]:
    """Rows of each source that each lane [L] took before the global row `row` of the last segment; sources that rest
    included."""
    if not segments:
        return {}
    order, before = _order_of(_mixtures(segments), seed)
    return before | order.consumed(row)


def _mixtures(segments: tuple[Segment, ...]) -> tuple[_Mixture, ...]:
    found: list[_Mixture] = []
    for segment in segments:
        mixture = _Mixture(segment.first_row, segment.lanes, segment.window_blocks, segment.sources)
        if not found or found[-1][1:] != mixture[1:]:
            found.append(mixture)
    return tuple(found)


@functools.lru_cache(maxsize=512)
def _order_of(mixtures: tuple[_Mixture, ...], seed: int) -> tuple[RowOrder, dict[str, I64]]:
    """The order of the last mixture, and what each lane took of each source before it."""
    for number in range(_DEEPEST, len(mixtures), _DEEPEST):  # earlier ones first: a long schedule is no deep recursion
        _order_of(mixtures[:number], seed)
    mixture, consumed = mixtures[-1], dict[str, I64]()
    if len(mixtures) > 1:
        previous, before = _order_of(mixtures[:-1], seed)
        consumed = before | previous.consumed(mixture.first_row)
    shapes = [SourceShape(s.name, s.num_blocks, s.rows_per_block, s.weight) for s in mixture.sources]
    order = RowOrder(shapes, seed, mixture.lanes, mixture.window_blocks, mixture.first_row, consumed)
    return order, consumed


class Span(NamedTuple):
    """Steps of one segment over rows without a gap; the last one is open (`num_steps` None)."""

    first_step: int
    first_row: int
    num_steps: int | None
    rows_per_step: int
    segment: Segment


def step_spans(state: DataState) -> list[Span]:
    """Which rows belong to which steps, past and (without further changes) to come."""
    spans: list[Span] = []
    step = 0
    for number, segment in enumerate(state.segments):
        last = number + 1 == len(state.segments)
        end = None if last else state.segments[number + 1].first_row
        row, size = segment.first_row, segment.rows_per_step
        for skip in state.skips:
            if row <= skip.first_row and (end is None or skip.first_row < end):
                steps = (skip.first_row - row) // size
                spans.append(Span(step, row, steps, size, segment))
                step, row = step + steps, skip.end_row
            elif skip.first_row <= row < skip.end_row:
                row = skip.end_row
        steps_left = None if end is None else max(end - row, 0) // size
        spans.append(Span(step, row, steps_left, size, segment))
        step += steps_left or 0
    return [span for span in spans if span.num_steps != 0]


def steps_by_segment(state: DataState, first_step: int, end_step: int) -> list[tuple[Segment, int]]:
    """How many of the steps first_step..end_step-1 each segment has."""
    found = []
    for span in step_spans(state):
        last = end_step if span.num_steps is None else min(end_step, span.first_step + span.num_steps)
        steps = last - max(first_step, span.first_step)
        if steps > 0:
            found.append((span.segment, steps))
    return found
