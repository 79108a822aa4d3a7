"""The data pipeline of a run as text: what is read, in which shares, how often. PURE.

Takes config, opened sources and their order -> gives a tree, one line per stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from pretrain.config.schema import RunConfig
from pretrain.data.order import RowOrder
from pretrain.data.rows import SourceRows


def describe_pipeline(config: RunConfig, sources: Sequence[SourceRows], order: RowOrder) -> str:
    """Sources with quotas and epochs over the run, then order, objective and micro-batches."""
    batch = config.batch
    total_rows = batch.global_batch_size * config.schedule.total_steps
    lines = [f"data of {config.name}: {total_rows:,} rows in {config.schedule.total_steps:,} steps"]
    for source, quota in zip(sources, order.quotas, strict=True):
        manifest = source.manifest
        rows = total_rows * quota / order.period
        lines.append(
            f"├─ source {source.name}: {manifest.documents:,} documents, {manifest.tokens:,} tokens in "
            f"{manifest.blocks:,} blocks x {source.rows_per_block} rows; {quota} of {order.period} rows, "
            f"{rows / source.num_rows:.2f} epochs over the run"
        )
    microbatches = batch.global_batch_size // batch.micro_batch_size
    step_tokens = batch.global_batch_size * batch.sequence_length
    width = f"{batch.sequence_length} tokens"
    if config.objective.kind == "seq2seq":
        width = f"{batch.source_length} source and {batch.sequence_length} target tokens"
    return "\n".join(
        [
            *lines,
            f"├─ order: seed {config.seed}, {config.data.lanes} lanes, windows of {config.data.window_blocks} blocks",
            f"├─ objective: {config.objective.kind}, rows of {width}, documents isolated",
            f"└─ step: {batch.global_batch_size} rows = {microbatches} micro-batches x {batch.micro_batch_size} rows; "
            f"{step_tokens:,} token slots a step, {step_tokens * config.schedule.total_steps:,} in the run",
        ]
    )
