"""Objectives on plain text by kind: what the rows of a token source become in a run.

Takes a config and a source's manifest -> gives a `TokenObjective`.
Adding one: a file with the pure function, a config class and one line of `_MAKERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pretrain.config.schema import MaskedLMObjective, RunConfig
from pretrain.data.format import Manifest
from pretrain.data.objective import I64, Ids, PackedRow, causal_lm_row
from pretrain.data.objective_masked import MaskRule, masked_lm_row
from pretrain.errors import DataError

MakeRow = Callable[[Ids, I64, int, int], PackedRow]
"""(ids [S + 1], document ends, real tokens, key) -> what the model reads."""


@dataclass(frozen=True, slots=True)
class TokenObjective:
    """How a slice of a block becomes a row.

    Attributes:
        row_tokens: S, tokens of the slice.
        make: the pure function, with the run's rules bound to it.
    """

    row_tokens: int
    make: MakeRow


def token_objective(config: RunConfig, manifest: Manifest, field: str) -> TokenObjective:
    """The objective of a run on one source. Pairs are packed as they are read, so theirs needs no rule here.

    Args:
        field: the source in the config, for messages.

    Raises:
        DataError: the run's special ids are ids of the source's tokenizer.
    """
    maker = _MAKERS.get(config.objective.kind)
    if maker is None:
        return causal_objective(config.batch.sequence_length)
    return TokenObjective(config.batch.sequence_length, maker(config, manifest, field))


def causal_objective(row_tokens: int) -> TokenObjective:
    """Predict the next token: nothing is random in it."""
    return TokenObjective(row_tokens, lambda ids, ends, num_real, key: causal_lm_row(ids, ends, num_real))


def _masked(config: RunConfig, manifest: Manifest, field: str) -> MakeRow:
    objective = config.objective
    assert isinstance(objective, MaskedLMObjective)
    mask_id = config.model.vocabulary_size - 1 if objective.mask_id is None else objective.mask_id
    if objective.mask_id is None and mask_id < manifest.vocabulary_size:
        raise DataError(
            f"model.vocabulary_size={config.model.vocabulary_size} leaves no id for the mask: the tokenizer of {field} "
            f"has {manifest.vocabulary_size}. A masked token needs an id that is no text. "
            f"Set model.vocabulary_size={manifest.vocabulary_size + 1} or more, or objective.mask_id to a special id."
        )
    control_ids = (manifest.eos_id, manifest.pad_id, manifest.start_id)
    rule = MaskRule.of(objective.mask_probability, mask_id, num_ids=manifest.vocabulary_size, control_ids=control_ids)
    return lambda ids, ends, num_real, key: masked_lm_row(ids, ends, num_real, rule, key)


_MAKERS: dict[str, Callable[[RunConfig, Manifest, str], MakeRow]] = {"masked_lm": _masked}
