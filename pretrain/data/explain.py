"""From a row or a step back to the text that it was made of: for loss spikes and for doubts.

Takes a config and a number (with the data state of a checkpoint, if the run changed on its way) ->
gives source, shard, block and documents with where they came from.

Invariants: reads through the same order, blocks and checks as training; nothing is guessed: a row
that a skip jumped over belongs to no step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pretrain.config.schema import RunConfig
from pretrain.data.blocks import PairBlock, TokenBlock
from pretrain.data.objective import Ids
from pretrain.data.order import RowAddress
from pretrain.data.rows import SourceRows, open_sources
from pretrain.data.segments import order_of, step_spans
from pretrain.data.stages import plan_of, plan_run
from pretrain.data.state import DataState
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError


@dataclass(frozen=True, slots=True)
class DocumentPart:
    """The part of one document that lies in a row.

    Attributes:
        id, origin, line: where the document came from (line 0: a whole file).
        num_tokens: of the part (its target side for pairs).
        begins, ends: whether the document begins and ends in this row.
        text: of the part; invalid UTF-8 at a cut shows as U+FFFD.
        source_text: of the source side (pairs only).
        metadata: the fields that the build was told to keep (`--keep`).
        trained_tokens: tokens that are targets, where the source says so; None: all but the document's first.
    """

    id: str
    origin: str
    line: int
    num_tokens: int
    begins: bool
    ends: bool
    text: str
    source_text: str | None = None
    metadata: dict[str, Any] | None = None
    trained_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RowExplanation:
    """One row: its place in the run and in the data, and its documents. `step` is None for a skipped row.

    Attributes:
        row: global row, of the run's longest length.
        part: which part of it, where the step's rows are shorter.
        rows_in_step: rows of its step.
    """

    row: int
    part: int
    rows_in_step: int
    step: int | None
    micro_batch: int | None
    source: str
    epoch: int
    shard: str
    block: int
    row_in_block: int
    masked: bool
    documents: tuple[DocumentPart, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def explain_row(config: RunConfig, row: int, *, state: DataState | None = None) -> RowExplanation:
    """What the global row `row` holds (its first part, where the step's rows are shorter).

    Args:
        state: of a checkpoint; needed if weights or batch size changed, or rows were skipped or masked.

    Raises:
        UserError: a negative row.
        DataError: a source is missing, damaged or does not fit the config.
        StoreError: the storage failed.
    """
    return explain_rows(config, range(row, row + 1), state=state)[0]


def explain_step(
    config: RunConfig, step: int, *, state: DataState | None = None, most_rows: int | None = None
) -> list[RowExplanation]:
    """What each row of optimizer step `step` (from 0) holds, in row order.

    Args:
        most_rows: only the first so many; None is all.

    Raises:
        UserError: a negative step.
        DataError, StoreError: as for `explain_row`.
    """
    if step < 0:
        raise UserError(f"step={step} is negative. Steps count from 0. Give one from 0 on.")
    sources = open_sources(config, "sources")
    state = state or _initial_state(config, sources)
    span = [span for span in step_spans(state) if span.first_step <= step][-1]
    first = span.first_row + (step - span.first_step) * span.rows_per_step
    count = span.rows_per_step if most_rows is None else min(-(-most_rows // span.segment.parts), span.rows_per_step)
    return _explain(config, sources, state, range(first, first + count))[:most_rows]


def explain_rows(config: RunConfig, rows: range, *, state: DataState | None = None) -> list[RowExplanation]:
    """`explain_row` for several rows; opens the sources once."""
    if rows.start < 0:
        raise UserError(f"row={rows.start} is negative. Rows count from 0. Give one from 0 on.")
    sources = open_sources(config, "sources")
    return _explain(config, sources, state or _initial_state(config, sources), rows)


def format_explanations(explanations: Sequence[RowExplanation], *, characters: int = 200) -> str:
    """A few lines per row for people; `characters` of text per document (0: all)."""
    lines = []
    for item in explanations:
        place = "skipped" if item.step is None else f"step {item.step}, micro-batch {item.micro_batch}"
        mask = ", masked" if item.masked else ""
        part_of = f", part {item.part}" if any(other.part for other in explanations) else ""
        lines.append(
            f"row {item.row}{part_of} ({place}{mask}): source {item.source}, epoch {item.epoch}, {item.shard}, "
            f"block {item.block}, row {item.row_in_block} of the block"
        )
        for part in item.documents:
            where = f"{part.origin}:{part.line}" if part.line else part.origin
            name = "" if part.id in (where, part.origin) else f" [{part.id}]"
            cut = "" if part.begins and part.ends else " (a part)"
            kept = "".join(f" {key}={value}" for key, value in (part.metadata or {}).items())
            marked = "" if part.trained_tokens is None else f", {part.trained_tokens} trained"
            lines.append(f"  {where}{name}, {part.num_tokens} tokens{marked}{cut}{kept}")
            if part.source_text is not None:
                lines.append(f"    > {_shortened(part.source_text, characters)}")
            lines.append(f"    {_shortened(part.text, characters)}")
    return "\n".join(lines)


def _initial_state(config: RunConfig, sources: dict[str, SourceRows]) -> DataState:
    return plan_run(plan_of(config, tuple(sources.values())), DataState(next_row=0, seed=config.seed, segments=()))


def _explain(config: RunConfig, sources: dict[str, SourceRows], state: DataState, rows: range) -> list[RowExplanation]:
    tokenizer = Tokenizer.load(config.tokenizer)
    explanations = []
    for row in rows:
        segments = tuple(segment for segment in state.segments if segment.first_row <= row)
        address, segment = order_of(segments, state.seed).locate(row), segments[-1]
        source = sources[segment.sources[address.source].name]
        step, position = _step_of(state, row)
        shard, _ = source.reader.locate(address.block)
        for part in range(segment.parts):
            place = address._replace(row=address.row * segment.parts + part)
            number = (position * segment.parts + part) // segment.micro_batch_size
            explanations.append(
                RowExplanation(
                    row=row,
                    part=part,
                    rows_in_step=segment.global_batch_size,
                    step=step,
                    micro_batch=None if step is None else number,
                    source=source.name,
                    epoch=address.epoch,
                    shard=source.manifest.shards[shard].name,
                    block=address.block,
                    row_in_block=place.row,
                    masked=any(
                        (q.source, q.block) == (source.name, address.block) and q.from_row <= row
                        for q in state.quarantine
                    ),
                    documents=tuple(_documents(source, place, segment.sequence_length, tokenizer)),
                )
            )
    return explanations


def _step_of(state: DataState, row: int) -> tuple[int | None, int]:
    """The step of a row and the row's place in it; no step for a row that is jumped over."""
    for span in step_spans(state):
        step, position = divmod(row - span.first_row, span.rows_per_step)
        if step >= 0 and (span.num_steps is None or step < span.num_steps):
            return span.first_step + step, position
    return None, 0


def _documents(
    source: SourceRows, address: RowAddress, sequence_length: int, tokenizer: Tokenizer
) -> list[DocumentPart]:
    content = source.reader.read(address.block)
    provenance, continued = source.reader.provenance(address.block)
    packed = source.manifest.packed  # such rows are never cut
    marks = content.trained if isinstance(content, TokenBlock) else None
    if isinstance(content, TokenBlock):
        ids, ends, capacity = content.ids, content.ends, sequence_length
        real = content.real_tokens
    else:
        ids, ends, capacity = content.target_ids, content.target_ends, source.manifest.target_capacity
    if packed:
        last = int(ends.searchsorted((address.row + 1) * capacity, side="right"))
        real = int(ends[last - 1]) if last else 0
    start = address.row * capacity
    stop = min(start + capacity, real)
    number = int(ends.searchsorted(start, side="right"))
    parts: list[DocumentPart] = []
    first = start
    while first < stop:
        end = int(ends[number]) if number < ends.size else real
        until = min(end, stop)
        origin = provenance[number]
        parts.append(
            DocumentPart(
                id=origin.id,
                origin=origin.origin,
                line=origin.line,
                num_tokens=until - first,
                begins=packed or (first == int(ends[number - 1]) if number else first == 0 and not continued),
                ends=number < ends.size and end <= stop,
                text=tokenizer.decode(ids[first:until]),
                source_text=_source_text(content, source, address, len(parts), tokenizer),
                metadata=origin.metadata,
                trained_tokens=None if marks is None else int(marks[first:until].sum()),
            )
        )
        first, number = until, number + 1
    return parts


def _source_text(
    content: TokenBlock | PairBlock, source: SourceRows, address: RowAddress, place: int, tokenizer: Tokenizer
) -> str | None:
    """The source side of the pair at `place` in the row."""
    if isinstance(content, TokenBlock):
        return None
    start = address.row * source.manifest.source_capacity
    number = int(content.source_ends.searchsorted(start, side="right")) + place
    begin = start if place == 0 else int(content.source_ends[number - 1])
    ids: Ids = content.source_ids[begin : int(content.source_ends[number])]
    return tokenizer.decode(ids)


def _shortened(text: str, characters: int) -> str:
    shown = text if not characters or len(text) <= characters else text[:characters] + "…"
    return shown.replace("\n", "\\n")
