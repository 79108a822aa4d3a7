"""The data pipeline of a run as text: what is read, in which shares, how often. PURE.

Takes config, opened sources and the planned state -> gives a tree, one line per stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from pretrain.config.capacity import row_capacity
from pretrain.config.schema import RunConfig
from pretrain.data.forecast import row_of_step, rows_taken, step_of_row
from pretrain.data.rows import SourceRows
from pretrain.data.segments import order_of
from pretrain.data.state import DataState


def describe_pipeline(config: RunConfig, sources: Sequence[SourceRows], state: DataState) -> str:
    """Sources with epochs over the run, its segments, then order, objective and micro-batches."""
    end = row_of_step(state, config.schedule.total_steps)
    taken = rows_taken(state, end)
    lines = [f"data of {config.name}: {sum(taken.values()):,} rows in {config.schedule.total_steps:,} steps"]
    for source in sources:
        manifest = source.manifest
        lines.append(
            f"├─ source {source.name}: {manifest.documents:,} documents, {manifest.tokens:,} tokens in "
            f"{manifest.blocks:,} blocks x {source.rows_per_block} rows; "
            f"{taken.get(source.name, 0) / source.num_rows:.2f} epochs over the run"
        )
    for number, segment in enumerate(state.segments):
        order = order_of(state.segments[: number + 1], state.seed)
        mixed = ", ".join(
            f"{s.name} {quota} of {order.period} rows" for s, quota in zip(segment.sources, order.quotas, strict=True)
        )
        shape = ""
        if len({(s.global_batch_size, s.micro_batch_size, s.sequence_length) for s in state.segments}) > 1:
            shape = (
                f"; {segment.global_batch_size} rows of {segment.sequence_length} tokens a step in micro-batches of "
                f"{segment.micro_batch_size}"
            )
        lines.append(f"├─ from step {step_of_row(state, segment.first_row):,}: {mixed}{shape}")
    lines += [f"├─ rows [{skip.first_row:,}, {skip.end_row:,}) are jumped over" for skip in state.skips]
    first = state.segments[0]
    lengths = sorted({segment.sequence_length for segment in state.segments})
    width = ", ".join(_row_width(config, length) for length in lengths)
    step = f"{first.slots_per_step:,} token slots a step"
    if len({(segment.global_batch_size, segment.sequence_length) for segment in state.segments}) == 1:
        micro_batches = first.global_batch_size // first.micro_batch_size
        step = f"{first.global_batch_size} rows = {micro_batches} micro-batches x {first.micro_batch_size} rows; {step}"
    else:
        step = f"at first {step}"
    jumped = sum(max(0, min(skip.end_row, end) - skip.first_row) for skip in state.skips)
    return "\n".join(
        [
            *lines,
            f"├─ order: seed {config.seed}, {config.data.lanes} lanes, windows of {config.data.window_blocks} blocks",
            f"├─ objective: {config.objective.kind}, rows of {width}, documents isolated, "
            f"each ended once by id {sources[0].manifest.eos_id}",
            f"└─ step: {step}, {(end - jumped) * first.row_tokens:,} in the run",
        ]
    )


def _row_width(config: RunConfig, length: int) -> str:
    batch = config.batch.model_copy(update={"sequence_length": length})
    slots = row_capacity(config.objective, batch, config.model.layout)
    if slots.source is not None:
        return f"{length} tokens in slots of {slots.source} source and {slots.target} target tokens"
    return f"{length} tokens" + (f" in slots of {slots.target}" if slots.target != length else "")
