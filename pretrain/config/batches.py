"""The batch sections of a run: the one that it begins with, then one from each stage of its data on. PURE.

Takes `batch` and `data.stages` -> gives every `BatchConfig` that a step of the run can have. A stage changes what it
names; the rest stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

from pretrain.config.schema import BatchConfig, RunConfig, StageConfig

BATCH_FIELDS = ("global_batch_size", "micro_batch_size", "sequence_length")


def batches_of(batch: BatchConfig, stages: Sequence[StageConfig]) -> tuple[BatchConfig, ...]:
    """The batch section before the first stage, then from each of them on."""
    found = [batch]
    for stage in stages:
        named = {name: getattr(stage, name) for name in BATCH_FIELDS if getattr(stage, name) is not None}
        found.append(found[-1].model_copy(update=named))
    return tuple(found)


def longest_batch(config: RunConfig) -> BatchConfig:
    """The first batch section with the longest rows: the unit of the order, and what validation reads."""
    return max(batches_of(config.batch, config.data.stages), key=lambda batch: batch.sequence_length)


def at_largest(config: RunConfig) -> RunConfig:
    """The config without stages, at the first batch section whose micro-batches have the most tokens, which needs the
    most memory: what plans of memory and time are made for."""
    sections = batches_of(config.batch, config.data.stages)
    largest = max(sections, key=lambda batch: (batch.micro_batch_size * batch.sequence_length, batch.global_batch_size))
    data = config.data.model_copy(update={"stages": []})
    return config.model_copy(update={"batch": largest, "data": data})
