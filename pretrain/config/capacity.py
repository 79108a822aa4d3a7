"""How many tokens a row of text becomes under an objective, at worst: the fixed shape of a run's micro-batches. PURE.

Takes the objective, the batch section and the model's layout -> gives the slots of a row on each side. A
row of S tokens holds documents of any lengths, the last one perhaps cut; the worst division of S into
documents is found exactly, by dynamic programming over the lengths. Nothing is ever cut to fit.
Source: own; counts of noise tokens and spans as in T5's `random_spans_noise_mask`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pretrain.config.families import Layout
from pretrain.config.objectives import (
    AnyObjective,
    FillInTheMiddleObjective,
    PrefixLMObjective,
    Seq2SeqObjective,
    SpanCorruptionObjective,
    UL2Objective,
)
from pretrain.config.schema import BatchConfig, RunConfig

# Longer documents need no more per token than shorter ones do, so divisions into those suffice beyond this length.
_LONGEST_TRIED = 2048
_MULTIPLE = 8
FIM_MARKERS = 3


@dataclass(frozen=True, slots=True)
class RowCapacity:
    """Slots of a row.

    Attributes:
        target: of the decoder, or of the only stack.
        source: of the encoder; None where there is none.
        longest: tokens of the longest document on the target side.
    """

    target: int
    source: int | None
    longest: int


class Noise(NamedTuple):
    """What is hidden of a document.

    Attributes:
        density: share of its text tokens.
        mean_span: mean length of the spans; None hides the end in one piece.
        mode: name of the mode token in front, or None.
    """

    density: float
    mean_span: float | None
    mode: str | None = None


class TaskSize(NamedTuple):
    """Tokens of one document's task: what is given, what is predicted."""

    inputs: int
    targets: int


def noises_of(objective: AnyObjective) -> tuple[Noise, ...]:
    """What an objective may do to a document; none where it does not hide anything."""
    if isinstance(objective, SpanCorruptionObjective):
        return (Noise(objective.noise_density, objective.mean_span_tokens),)
    if isinstance(objective, UL2Objective):
        return tuple(Noise(d.noise_density, d.mean_span_tokens, d.mode) for d in objective.denoisers.values())
    return ()


def noise_counts(body: int, noise: Noise) -> tuple[int, int]:
    """(noise tokens, spans) of a document of `body` >= 2 text tokens; at least one token of each kind stays."""
    num_noise = min(max(math.floor(body * noise.density + 0.5), 1), body - 1)
    if noise.mean_span is None:
        return num_noise, 1
    num_spans = max(1, math.floor(num_noise / noise.mean_span + 0.5))
    return num_noise, min(num_spans, num_noise, body - num_noise)


def task_size(body: int, ended: bool, noise: Noise) -> TaskSize:
    """Sizes for a document of `body` text tokens, without its end, which it has if `ended`."""
    num_noise, num_spans = noise_counts(body, noise)
    given = body - num_noise + (noise.mode is not None)
    if noise.mean_span is None:  # the hidden end goes on to the end of the text, or to the token behind the row
        return TaskSize(given, num_noise + 1)
    return TaskSize(given + num_spans + ended, num_noise + num_spans + 1)


def most_sentinels(objective: AnyObjective, sequence_length: int) -> int:
    """Spans of the document that has most of them."""
    spans = [noise for noise in noises_of(objective) if noise.mean_span is not None]
    # Not the longest document alone: where little may stay, fewer tokens make more spans.
    return max((noise_counts(body, noise)[1] for noise in spans for body in range(2, sequence_length + 1)), default=0)


def row_capacity(objective: AnyObjective, batch: BatchConfig, layout: Layout) -> RowCapacity:
    """Slots of a row of `batch.sequence_length` tokens of text (of a pair source: of its capacities)."""
    length = batch.sequence_length
    if isinstance(objective, Seq2SeqObjective):
        return RowCapacity(length, batch.source_length, length)
    if isinstance(objective, PrefixLMObjective):
        if layout == "encoder_decoder":
            # Both sides end in padding, so that they hold equally many documents.
            return RowCapacity(_rounded(length + 1), _rounded(length + 1), length)
        return RowCapacity(length, None, length)
    if isinstance(objective, FillInTheMiddleObjective):
        extra = _most_extra(length, objective.min_document_tokens)
        return RowCapacity(_rounded(length + extra), None, length + min(extra, FIM_MARKERS + 1))
    if isinstance(objective, SpanCorruptionObjective | UL2Objective):
        return _denoising_capacity(
            noises_of(objective), objective.min_document_tokens, length, layout == "encoder_decoder"
        )
    return RowCapacity(length, None, length)


def model_batch(config: RunConfig, batch: BatchConfig | None = None) -> BatchConfig:
    """The batch section (or another one) as the model meets it: the lengths are the slots of a row on each side."""
    batch = batch or config.batch
    capacity = row_capacity(config.objective, batch, config.model.layout)
    return batch.model_copy(update={"sequence_length": capacity.target, "source_length": capacity.source})


@lru_cache(maxsize=64)
def _denoising_capacity(noises: tuple[Noise, ...], shortest: int, length: int, two_sided: bool) -> RowCapacity:
    def largest(count: Callable[[TaskSize], int]) -> Callable[[int, bool], int]:
        return lambda body, ended: max(count(task_size(body, ended, noise)) for noise in noises)

    if two_sided:
        inputs = _worst(length, shortest, largest(lambda size: size.inputs))
        targets = _worst(length, shortest, largest(lambda size: size.targets))
        longest = max(
            (largest(lambda size: size.targets)(body, False) for body in range(shortest, length + 1)), default=1
        )
        return RowCapacity(_rounded(targets + 1), _rounded(inputs + 1), longest)
    joined = largest(lambda size: size.inputs + size.targets - 1)  # the last target is read by nobody
    longest = max((joined(body, False) for body in range(shortest, length + 1)), default=1)
    return RowCapacity(_rounded(_worst(length, shortest, joined)), None, longest)


@lru_cache(maxsize=64)
def _most_extra(length: int, shortest: int) -> int:
    """Markers that fill-in-the-middle adds to a row at most; a cut document gets an end as well."""
    return _worst(length, shortest, lambda body, ended: FIM_MARKERS + (not ended))


def _worst(length: int, shortest: int, tokens: Callable[[int, bool], int]) -> int:
    """The largest total over all divisions of a row of `length` tokens into documents.

    Args:
        shortest: text tokens that a document needs to count at all.
        tokens: what a document of so many text tokens counts; ended (one more token of the row) or not.
    """
    reach = min(length, max(_LONGEST_TRIED, 4 * shortest))
    ended = np.zeros(reach + 1, dtype=np.int64)
    for body in range(shortest, reach):
        ended[body + 1] = tokens(body, True)
    best = np.zeros(length + 1, dtype=np.int64)
    for place in range(1, length + 1):
        first = max(0, place - reach)
        best[place] = max(best[place - 1], int((best[first:place] + ended[place - first : 0 : -1]).max()))
    cut = (int(best[length - body]) + tokens(body, False) for body in (*range(shortest, reach + 1), length))
    return max(int(best[length]), max(cut, default=0)) if length >= shortest else 0


def _rounded(tokens: int) -> int:
    """Up to what matrix kernels like."""
    return -(-tokens // _MULTIPLE) * _MULTIPLE
