"""Objectives on plain text by kind: what the rows of a token source become in a run.

Takes a config and a source's manifest -> gives a `TokenObjective`.
Adding one: a file with the pure function, a config class and one line of `_MAKERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pretrain.config.capacity import most_sentinels, noises_of
from pretrain.config.schema import (
    FillInTheMiddleObjective,
    MaskedLMObjective,
    PrefixLMObjective,
    RunConfig,
    SpanCorruptionObjective,
    UL2Objective,
)
from pretrain.data.format import Manifest
from pretrain.data.objective import I64, Ids, PackedRow, causal_lm_row
from pretrain.data.objective_fim import FimRule, fill_in_the_middle_row
from pretrain.data.objective_masked import MaskRule, masked_lm_row
from pretrain.data.objective_prefix import prefix_lm_tasks
from pretrain.data.objective_spans import Corruption, Denoiser, span_tasks
from pretrain.data.objective_tasks import Task, pair_row, prefix_row
from pretrain.data.special_tokens import fim_markers, mode_id, sentinel_ids
from pretrain.errors import DataError

MakeRow = Callable[[Ids, I64, int, int], PackedRow]
"""(ids [S + 1], document ends, real tokens, key) -> what the model reads."""

NEED_SPECIAL_IDS = ("fill_in_the_middle", "span_corruption", "ul2")
"""Kinds whose control ids only the tokenizer knows."""


@dataclass(frozen=True, slots=True)
class TokenObjective:
    """How a slice of a block becomes a row.

    Attributes:
        row_tokens: S, tokens of the slice.
        make: the pure function, with the run's rules bound to it.
    """

    row_tokens: int
    make: MakeRow


@dataclass(frozen=True, slots=True)
class _Source:
    """What a maker looks at.

    Attributes:
        field: the source in the config, for messages.
        special_ids: of the tokenizer by name; empty where the objective needs none.
        row_tokens: S, tokens of text in a row.
    """

    config: RunConfig
    manifest: Manifest
    field: str
    special_ids: Mapping[str, int]
    row_tokens: int


def token_objective(
    config: RunConfig,
    manifest: Manifest,
    field: str,
    special_ids: Mapping[str, int] | None = None,
    *,
    row_tokens: int,
) -> TokenObjective:
    """The objective of a run on rows of one length of one source. Pairs are packed as they are read, without a
    rule.

    Args:
        field: the source in the config, for messages.
        special_ids: the tokenizer's control ids by name; for kinds in `NEED_SPECIAL_IDS`.

    Raises:
        DataError: the run's special ids are ids of the source's tokenizer, or the tokenizer lacks some.
    """
    maker = _MAKERS.get(config.objective.kind)
    if maker is None:
        return causal_objective(row_tokens)
    return TokenObjective(row_tokens, maker(_Source(config, manifest, field, special_ids or {}, row_tokens)))


def causal_objective(row_tokens: int) -> TokenObjective:
    """Predict the next token: nothing is random in it."""
    return TokenObjective(row_tokens, lambda ids, ends, num_real, key: causal_lm_row(ids, ends, num_real))


def _masked(source: _Source) -> MakeRow:
    config, manifest = source.config, source.manifest
    objective = config.objective
    assert isinstance(objective, MaskedLMObjective)
    mask_id = config.model.vocabulary_size - 1 if objective.mask_id is None else objective.mask_id
    if objective.mask_id is None and mask_id < manifest.vocabulary_size:
        raise DataError(
            f"model.vocabulary_size={config.model.vocabulary_size} leaves no id for the mask: the tokenizer of "
            f"{source.field} has {manifest.vocabulary_size}. A masked token needs an id that is no text. "
            f"Set model.vocabulary_size={manifest.vocabulary_size + 1} or more, or objective.mask_id to a special id."
        )
    control_ids = (manifest.eos_id, manifest.pad_id, manifest.start_id)
    rule = MaskRule.of(objective.mask_probability, mask_id, num_ids=manifest.vocabulary_size, control_ids=control_ids)
    return lambda ids, ends, num_real, key: masked_lm_row(ids, ends, num_real, rule, key)


def _prefix_lm(source: _Source) -> MakeRow:
    objective = source.config.objective
    assert isinstance(objective, PrefixLMObjective)
    pack = _packer(source, bidirectional=objective.bidirectional_prefix)
    return lambda ids, ends, num_real, key: pack(prefix_lm_tasks(ids, ends, num_real, key))


def _fill_in_the_middle(source: _Source) -> MakeRow:
    objective = source.config.objective
    assert isinstance(objective, FillInTheMiddleObjective)
    markers = fim_markers(source.special_ids)
    shortest = objective.min_document_tokens
    rule = FimRule(objective.rate, objective.spm_rate, shortest, markers, source.manifest.eos_id)
    return lambda ids, ends, num_real, key: fill_in_the_middle_row(ids, ends, num_real, rule, key)


def _denoising(source: _Source) -> MakeRow:
    objective = source.config.objective
    assert isinstance(objective, SpanCorruptionObjective | UL2Objective)
    weights = [d.weight for d in objective.denoisers.values()] if isinstance(objective, UL2Objective) else [1.0]
    denoisers = tuple(
        Denoiser(noise, weight, None if noise.mode is None else mode_id(source.special_ids, noise.mode))
        for noise, weight in zip(noises_of(objective), weights, strict=True)
    )
    length = source.row_tokens
    why = f"objective.kind={objective.kind} with batch.sequence_length={length}"
    sentinels = sentinel_ids(source.special_ids, most_sentinels(objective, length), why)
    rule = Corruption(
        denoisers, objective.min_document_tokens, np.array(sentinels, dtype=np.int64), source.manifest.eos_id
    )
    pack = _packer(source, bidirectional=objective.bidirectional_prefix)
    return lambda ids, ends, num_real, key: pack(span_tasks(ids, ends, num_real, rule, key))


def _packer(source: _Source, *, bidirectional: bool) -> Callable[[Sequence[Task]], PackedRow]:
    """How tasks become a row for the run's model."""
    if source.config.model.layout == "encoder_decoder":
        start_id = source.manifest.start_id
        return lambda tasks: pair_row(tasks, start_id)
    return lambda tasks: prefix_row(tasks, bidirectional=bidirectional)


_MAKERS: dict[str, Callable[[_Source], MakeRow]] = {
    "masked_lm": _masked,
    "prefix_lm": _prefix_lm,
    "fill_in_the_middle": _fill_in_the_middle,
    "span_corruption": _denoising,
    "ul2": _denoising,
}
