"""What a run will read, before it reads it: shares, epochs, tokens and block reads. PURE but for opened sources.

Takes a planned `DataState` and the sources' manifests -> gives a `Forecast` with exact rows; block reads per rank are
counted over the first rows of the run and scaled where it is longer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain.config.schema import RunConfig
from pretrain.data.rows import SourceRows
from pretrain.data.segments import consumed_before, order_of, step_spans
from pretrain.data.state import DataState, Segment

_COUNTED_ROWS = 1 << 17


@dataclass(frozen=True, slots=True)
class SourceForecast:
    """What a run takes from one source.

    Attributes:
        rows: exactly, of `rows_in_epoch` numbered ones.
        epochs: rows / rows_in_epoch.
        share: of all rows of the run.
        tokens: token slots of these rows.
        block_reads: blocks that one rank reads; `read_bytes` their bytes with index and provenance left out.
    """

    name: str
    documents: int
    rows_in_epoch: int
    rows: int
    epochs: float
    share: float
    tokens: int
    block_reads: int
    read_bytes: int


@dataclass(frozen=True, slots=True)
class SegmentForecast:
    """Steps with one mixture and one shape: rows of each source in one period of `sum(quotas)` rows.

    Attributes:
        rows_per_step, micro_batch_size: in rows of `sequence_length` tokens.
        idle_fraction: of the micro-batches of all ranks, those that are empty because ranks do not divide them.
    """

    first_step: int
    first_row: int
    quotas: dict[str, int]
    rows_per_step: int
    micro_batch_size: int
    sequence_length: int
    idle_fraction: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """A whole run."""

    steps: int
    rows: int
    tokens: int
    counted_rows: int
    segments: tuple[SegmentForecast, ...]
    sources: tuple[SourceForecast, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def forecast(config: RunConfig, sources: Sequence[SourceRows], state: DataState, *, ranks: int) -> Forecast:
    """What the run reads from row 0 to `schedule.total_steps`, by one of `ranks` ranks."""
    steps = config.schedule.total_steps
    end = row_of_step(state, steps)
    taken = rows_taken(state, end)
    jumped = sum(max(0, min(skip.end_row, end) - skip.first_row) for skip in state.skips)
    reads, counted = _block_reads(state, end, ranks)
    total = sum(taken.values())
    found = []
    for source in sources:
        manifest, rows = source.manifest, taken.get(source.name, 0)
        block_bytes = sum(shard.bytes for shard in manifest.shards) / max(manifest.blocks, 1)
        found.append(
            SourceForecast(
                name=source.name,
                documents=manifest.documents,
                rows_in_epoch=source.num_rows,
                rows=rows,
                epochs=rows / source.num_rows,
                share=rows / max(total, 1),
                tokens=rows * state.segments[0].row_tokens,
                block_reads=reads.get(source.name, 0),
                read_bytes=round(reads.get(source.name, 0) * block_bytes),
            )
        )
    rows = end - jumped
    segments = tuple(_segment(state, number, ranks) for number in range(len(state.segments)))
    return Forecast(steps, rows, rows * state.segments[0].row_tokens, counted, segments, tuple(found))


def _segment(state: DataState, number: int, ranks: int) -> SegmentForecast:
    segment = state.segments[number]
    quotas = order_of(state.segments[: number + 1], state.seed).quotas
    return SegmentForecast(
        first_step=step_of_row(state, segment.first_row),
        first_row=segment.first_row,
        quotas=dict(zip((source.name for source in segment.sources), quotas, strict=True)),
        rows_per_step=segment.global_batch_size,
        micro_batch_size=segment.micro_batch_size,
        sequence_length=segment.sequence_length,
        idle_fraction=idle_fraction(segment, ranks),
    )


def idle_fraction(segment: Segment, ranks: int) -> float:
    """Share of all ranks' micro-batches that are empty, because `ranks` does not divide those of a step."""
    micro_batches = segment.global_batch_size // segment.micro_batch_size
    return 1 - micro_batches / (-(-micro_batches // ranks) * ranks)


def rows_taken(state: DataState, row: int) -> dict[str, int]:
    """Rows of each source before the global row `row`, jumped ones included."""
    started = tuple(segment for segment in state.segments if segment.first_row <= row)
    return {name: int(lanes.sum()) for name, lanes in consumed_before(started, state.seed, row).items()}


def row_of_step(state: DataState, step: int) -> int:
    """The global row at which a step begins."""
    span = [span for span in step_spans(state) if span.first_step <= step][-1]
    return span.first_row + (step - span.first_step) * span.rows_per_step


def step_of_row(state: DataState, row: int) -> int:
    """The step that begins at `row` or, if none does, the last one before it."""
    span = [span for span in step_spans(state) if span.first_row <= row]
    return span[-1].first_step + (row - span[-1].first_row) // span[-1].rows_per_step if span else 0


def shares(state: DataState, steps: int, points: int) -> list[tuple[int, int, dict[str, float]]]:
    """(first step, step behind the last, share of each source's rows) of `points` equal parts of the run."""
    marks = sorted({steps * number // points for number in range(points + 1)})
    before, parts = rows_taken(state, row_of_step(state, 0)), []
    names = sorted({source.name for segment in state.segments for source in segment.sources})
    for first, end in itertools.pairwise(marks):
        after = rows_taken(state, row_of_step(state, end))
        rows = {name: after.get(name, 0) - before.get(name, 0) for name in names}
        parts.append((first, end, {name: count / sum(rows.values()) for name, count in rows.items()}))
        before = after
    return parts


def _block_reads(state: DataState, end: int, ranks: int) -> tuple[dict[str, int], int]:
    """Blocks that rank 0 reads by source, each once an epoch, and the rows over which they were counted."""
    counted = min(end, _COUNTED_ROWS)
    found: dict[str, list[NDArray[np.int64]]] = {}
    for span in step_spans(state):
        segment = span.segment
        stop = counted if span.num_steps is None else min(counted, span.first_row + span.num_steps * span.rows_per_step)
        rows = np.arange(span.first_row, max(span.first_row, stop), dtype=np.int64)
        parts = (rows - span.first_row) % span.rows_per_step * segment.parts
        first, last = parts // segment.micro_batch_size, (parts + segment.parts - 1) // segment.micro_batch_size
        mine = rows[last // ranks * ranks >= first]  # one of its micro-batches is rank 0's
        if not mine.size:
            continue
        started = tuple(one for one in state.segments if one.first_row <= span.first_row)
        placed = order_of(started, state.seed).place_rows(mine)
        for number, source in enumerate(segment.sources):
            found.setdefault(source.name, []).append(placed[placed[:, 0] == number][:, 1:3])
    reads = {name: len(np.unique(np.concatenate(places), axis=0)) for name, places in found.items()}
    return {name: round(count * end / max(counted, 1)) for name, count in reads.items()}, counted
