"""Rules on what is read: batch sizes, row lengths, stages, skips; see `rules`. PURE."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pretrain.config.schema import BatchConfig, DataConfig, HealthConfig, ObjectiveConfig


def batch_rules(batch: BatchConfig, data: DataConfig) -> list[str]:
    """Of the batch section and of what stages make of it."""
    from pretrain.config.batches import batches_of

    sections = batches_of(batch, data.stages)
    longest, problems = max(section.sequence_length for section in sections), list[str]()
    for number, section in enumerate(sections):
        where = "batch" if number == 0 else f"data.stages.{number - 1}"
        size, rows, length = section.global_batch_size, section.micro_batch_size, section.sequence_length
        if number and section == sections[number - 1]:
            continue
        if size % rows:
            problems.append(
                f"{where}.global_batch_size={size} is not a multiple of {where}.micro_batch_size={rows} "
                f"({size} = {size // rows} x {rows} + {size % rows}). A step is a whole number of micro-batches. "
                f"Set {where}.global_batch_size={size // rows * rows or rows} or another {where}.micro_batch_size."
            )
        if longest % length:
            problems.append(
                f"{where}.sequence_length={length} does not divide {longest}, the longest of the run. Shorter rows are "
                f"whole parts of the longest ones. Set {where}.sequence_length={math.gcd(longest, length)}."
            )
        elif size * length % longest:
            problems.append(
                f"{where}: {size} rows of {length} tokens are {size * length / longest:g} rows of {longest}, the "
                "longest of the run. A step takes whole ones, so that the next length finds none half read. "
                f"Set {where}.global_batch_size to a multiple of {longest // math.gcd(longest, length)}."
            )
    if batch.source_length is not None and len({section.sequence_length for section in sections}) > 1:
        problems.append(
            "data.stages change sequence_length with batch.source_length set. Pairs are packed for one pair of "
            "capacities. Leave it out of the stages."
        )
    return problems


def raw_rules(data: DataConfig, objective: ObjectiveConfig, health: HealthConfig) -> list[str]:
    """What reading raw text cannot do."""
    if data.reading == "blocks":
        return []
    capped = next((name for name, source in data.sources.items() if source.max_epochs is not None), None)
    refused = {
        "data.stages": bool(data.stages),
        "data.skip_rows": bool(data.skip_rows),
        f"data.sources.{capped}.max_epochs": capped is not None,
        "data.on_corrupt=mask": data.on_corrupt == "mask",
        "data.cache": data.cache is not None,
        "objective.kind=seq2seq": objective.kind == "seq2seq",
        "health.spike_z_score": health.spike_z_score is not None,
    }
    return [
        f"{field} does not fit data.reading=raw. Which rows a text gives is not known before it is read, so they "
        "cannot be planned, jumped over or masked. Leave it out, or build the source and set data.reading=blocks."
        for field, is_set in refused.items()
        if is_set
    ]


def _stage_rules(data: DataConfig) -> list[str]:
    from pretrain.config.batches import BATCH_FIELDS

    problems = []
    for number, stage in enumerate(data.stages):
        if (stage.from_step is None) == (stage.from_tokens is None):
            problems.append(
                f"data.stages.{number} has {'no mark' if stage.from_step is None else 'two marks'}. A stage begins at "
                "one step or behind a number of tokens. Set from_step or from_tokens."
            )
        unknown = sorted((stage.weights or {}).keys() - data.sources.keys())
        if stage.weights is None and all(getattr(stage, name) is None for name in BATCH_FIELDS):
            problems.append(
                f"data.stages.{number} changes nothing. A stage gives weights, {' or '.join(BATCH_FIELDS)}. "
                "Give one of them, or remove the stage."
            )
        if unknown:
            problems.append(
                f"data.stages.{number}.weights.{unknown[0]} is no source. A stage weighs sources of the run "
                f"({', '.join(sorted(data.sources))}). Add it under data.sources, or correct the name."
            )
    edges = [row for skip in data.skip_rows for row in skip]
    if sorted(set(edges)) != edges:
        problems.append(
            f"data.skip_rows={[list(skip) for skip in data.skip_rows]} do not ascend. Ranges [first, end) are not "
            "empty, do not touch and come in order. Sort them, and join those that touch."
        )
    return problems


def data_rules(data: DataConfig) -> list[str]:
    """Of lanes, stages and skips."""
    if data.lanes & (data.lanes - 1) == 0:
        return _stage_rules(data)
    return [
        *_stage_rules(data),
        f"data.lanes={data.lanes} is not a power of two. Lanes must divide the rows of a block. "
        f"Set data.lanes={1 << (data.lanes.bit_length() - 1)}.",
    ]
