"""Where a run stands in its data: a few KB, the same on every rank, valid for any number of ranks. PURE.

Takes rows consumed -> gives the rows of the next step, as JSON inside every checkpoint.

Invariants: `next_row` is where the next step begins and lies in no skip; skips begin at step
boundaries; a segment says how rows are read from its first one on (sources with the hashes of their manifests,
weights, lanes, batch size), those behind `next_row` are planned; a quarantined block
gives rows without labels from `from_row` on, so that a replay is identical whatever the disk says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pretrain.errors import DataError

_FORMAT = 2


@dataclass(frozen=True, slots=True)
class SegmentSource:
    """One source as a segment reads it."""

    name: str
    manifest_sha256: str
    weight: float
    num_blocks: int
    rows_per_block: int


@dataclass(frozen=True, slots=True)
class Segment:
    """How rows are read from `first_row` until the next segment.

    Attributes:
        global_batch_size, micro_batch_size: in rows of `sequence_length` tokens.
        row_tokens: tokens of a global row, the run's longest; shorter rows are its parts, one after the other, so that
            a change of length moves no row.
    """

    first_row: int
    global_batch_size: int
    micro_batch_size: int
    lanes: int
    window_blocks: int
    sequence_length: int
    row_tokens: int
    source_length: int | None
    sources: tuple[SegmentSource, ...]

    @property
    def micro_batch_shape(self) -> tuple[int, int, int | None]:
        """Rows of a micro-batch, their length, and that of their sources."""
        return self.micro_batch_size, self.sequence_length, self.source_length

    @property
    def parts(self) -> int:
        """Rows of `sequence_length` in a global row."""
        return self.row_tokens // self.sequence_length

    @property
    def rows_per_step(self) -> int:
        """Global rows that an optimizer step takes."""
        return self.global_batch_size // self.parts

    @property
    def slots_per_step(self) -> int:
        """Token slots of an optimizer step."""
        return self.global_batch_size * self.sequence_length


@dataclass(frozen=True, slots=True)
class Skip:
    """Rows [first_row, end_row) that are jumped over."""

    first_row: int
    end_row: int


@dataclass(frozen=True, slots=True)
class QuarantinedBlock:
    """A block whose rows lose their labels from the global row `from_row` on."""

    source: str
    block: int
    from_row: int


@dataclass(frozen=True, slots=True)
class RawPosition:
    """Where a lane stands in the text of a source (data.reading=raw).

    Attributes:
        epoch: times that the lane has read all its shards.
        shard: place in the lane's order of this epoch.
        document: with text, of that shard.
        token: of that document.
    """

    epoch: int = 0
    shard: int = 0
    document: int = 0
    token: int = 0


@dataclass(frozen=True, slots=True)
class DataState:
    """The whole position; see the module's docstring for the invariants. `raw`: by source, a position per lane."""

    next_row: int
    seed: int
    segments: tuple[Segment, ...]
    skips: tuple[Skip, ...] = ()
    quarantine: tuple[QuarantinedBlock, ...] = ()
    raw: tuple[tuple[RawPosition, ...], ...] = ()

    @property
    def segment(self) -> Segment:
        """The segment that the next step belongs to."""
        return self.started[-1]

    @property
    def started(self) -> tuple[Segment, ...]:
        """Segments up to the next step's; those behind them are planned."""
        if not self.segments or self.segments[-1].first_row <= self.next_row:
            return self.segments
        return tuple(segment for segment in self.segments if segment.first_row <= self.next_row)

    @property
    def step_rows(self) -> range:
        """Global rows of the next step."""
        return range(self.next_row, self.next_row + self.segment.rows_per_step)

    def advance(self, rows: int) -> DataState:
        """The state after `rows` more rows, past any skip that begins there.

        Raises:
            DataError: a skip begins inside these rows and not at their end.
        """
        after = self.next_row + rows
        for skip in self.skips:
            if self.next_row <= skip.first_row < after:
                raise DataError(
                    f"data.skips=[{skip.first_row}, {skip.end_row}) begins inside the step of rows "
                    f"[{self.next_row}, {after}). A skip begins where a step does. Move its beginning."
                )
        past = _past_skips(after, self.skips)  # `replace` is slower, and this is asked twice a step
        return DataState(past, self.seed, self.segments, self.skips, self.quarantine, self.raw)

    def with_skip(self, first_row: int, end_row: int) -> DataState:
        """The state that also jumps over rows [first_row, end_row).

        Raises:
            DataError: the range is empty, begins in the past, or not at a step boundary.
        """
        size = self.segment.rows_per_step
        if not self.next_row <= first_row < end_row or (first_row - self.next_row) % size:
            raise DataError(
                f"data.skips=[{first_row}, {end_row}) does not fit. A skip is not empty and begins at a step boundary, "
                f"which are {self.next_row}, {self.next_row + size}, … Choose one of these as its beginning."
            )
        skips = tuple(sorted({*self.skips, Skip(first_row, end_row)}, key=lambda skip: skip.first_row))
        return replace(self, skips=skips, next_row=_past_skips(self.next_row, skips))

    def with_quarantine(self, blocks: Iterable[tuple[str, int]]) -> DataState:
        """The state that masks these (source, block) from the next step on; known ones stay as they are."""
        known = {(entry.source, entry.block) for entry in self.quarantine}
        new = [QuarantinedBlock(*block, self.next_row) for block in sorted(set(blocks) - known)]
        return replace(self, quarantine=(*self.quarantine, *new)) if new else self

    def with_segment(self, segment: Segment) -> DataState:
        """The state that reads as `segment` says from the next row on; one that begins there is replaced."""
        earlier = tuple(s for s in self.segments if s.first_row < self.next_row)
        return replace(self, segments=(*earlier, replace(segment, first_row=self.next_row)))

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries and lists for a checkpoint."""
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> DataState:
        """Reads what `to_json` gave.

        Raises:
            DataError: another format, or fields that are missing, unknown, of a wrong type or out of order.
        """
        if not isinstance(body, Mapping) or body.get("format") != _FORMAT:
            found = body.get("format") if isinstance(body, Mapping) else type(body).__name__
            raise DataError(
                f"data state format={found} is not known. This version reads format {_FORMAT}. "
                "Resume with the version that wrote the checkpoint."
            )
        try:
            state = cls(
                next_row=_whole(body["next_row"]),
                seed=_whole(body["seed"]),
                segments=tuple(_segment(entry) for entry in body["segments"]),
                skips=tuple(Skip(_whole(e["first_row"]), _whole(e["end_row"])) for e in body["skips"]),
                quarantine=tuple(
                    QuarantinedBlock(str(e["source"]), _whole(e["block"]), _whole(e["from_row"]))
                    for e in body["quarantine"]
                ),
                raw=tuple(
                    tuple(RawPosition(**{name: _whole(value) for name, value in lane.items()}) for lane in lanes)
                    for lanes in body["raw"]
                ),
            )
            _check_order(state)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"the data state of the checkpoint is damaged ({type(error).__name__}: {error}). "
                "It holds next_row, seed, segments, skips and quarantine. Resume from another checkpoint."
            ) from None
        return state


def _past_skips(row: int, skips: tuple[Skip, ...]) -> int:
    for skip in skips:  # sorted, so that skips which touch each other are passed in one sweep
        if skip.first_row <= row < skip.end_row:
            row = skip.end_row
    return row


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a whole number >= 0")
    return value


def _segment(body: Mapping[str, Any]) -> Segment:
    source_length = body["source_length"]
    numbers = {
        name: _whole(body[name])
        for name in (
            *("first_row", "global_batch_size", "micro_batch_size", "lanes", "window_blocks", "sequence_length"),
            "row_tokens",
        )
    }
    return Segment(
        **numbers,
        source_length=None if source_length is None else _whole(source_length),
        sources=tuple(
            SegmentSource(
                name=str(entry["name"]),
                manifest_sha256=str(entry["manifest_sha256"]),
                weight=float(entry["weight"]),
                num_blocks=_whole(entry["num_blocks"]),
                rows_per_block=_whole(entry["rows_per_block"]),
            )
            for entry in body["sources"]
        ),
    )


def _check_order(state: DataState) -> None:
    first_rows = [segment.first_row for segment in state.segments]
    if not first_rows or first_rows[0] != 0 or sorted(set(first_rows)) != first_rows:
        raise ValueError(f"segments begin at rows {first_rows}")
    if any(skip.first_row >= skip.end_row for skip in state.skips):
        raise ValueError("a skip is empty")
