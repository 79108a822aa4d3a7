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
    batch = config.batch
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
        lines.append(f"├─ from step {step_of_row(state, segment.first_row):,}: {mixed}")
    lines += [f"├─ rows [{skip.first_row:,}, {skip.end_row:,}) are jumped over" for skip in state.skips]
    microbatches = batch.global_batch_size // batch.micro_batch_size
    step_tokens = batch.global_batch_size * batch.sequence_length
    slots = row_capacity(config.objective, batch, config.model.layout)
    width = f"{batch.sequence_length} tokens"
    if slots.source is not None:
        width += f" in slots of {slots.source} source and {slots.target} target tokens"
    elif slots.target != batch.sequence_length:
        width += f" in slots of {slots.target}"
    return "\n".join(
        [
            *lines,
            f"├─ order: seed {config.seed}, {config.data.lanes} lanes, windows of {config.data.window_blocks} blocks",
            f"├─ objective: {config.objective.kind}, rows of {width}, documents isolated",
            f"└─ step: {batch.global_batch_size} rows = {microbatches} micro-batches x {batch.micro_batch_size} rows; "
            f"{step_tokens:,} token slots a step, {step_tokens * config.schedule.total_steps:,} in the run",
        ]
    )
