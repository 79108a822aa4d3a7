"""Masked language modelling: guess some tokens of a document from all the others. PURE.

Takes slices of ids and document ends, and a key -> gives a `PackedRow` whose labels stand only at the
chosen tokens. Each token is chosen on its own with the rule's probability; of the chosen 80 % become
the mask id, 10 % a random id of the text's vocabulary, 10 % stay as they are.
Invariants: the end-of-text id, padding and other control ids are never chosen and never come in; the
row's layout is that of its documents; equal keys give equal rows. Source: Devlin et al. 2019, section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pretrain.data.objective import I64, Ids, PackedRow, document_lengths
from pretrain.data.random_stream import uniforms
from pretrain.sequence import IGNORED_LABEL

MASKED, REPLACED = 0.8, 0.9  # below the first: the mask id; below the second: a random id; else unchanged


@dataclass(frozen=True, slots=True)
class MaskRule:
    """What is chosen and what takes its place.

    Attributes:
        probability: of each token to be chosen.
        mask_id: stands for a masked token.
        is_text: bool [V], the ids that may be chosen.
        text_ids: int64, the same as a list: what may be put in.
    """

    probability: float
    mask_id: int
    is_text: NDArray[np.bool_]
    text_ids: I64

    @classmethod
    def of(cls, probability: float, mask_id: int, *, num_ids: int, control_ids: Iterable[int]) -> MaskRule:
        """For a tokenizer of ids 0..num_ids-1, of which the control ids are no text."""
        is_text = np.ones(num_ids, dtype=np.bool_)
        is_text[[number for number in (*control_ids, mask_id) if number < num_ids]] = False
        return cls(probability, mask_id, is_text, np.flatnonzero(is_text))


def masked_lm_row(ids: Ids, ends: I64, num_real: int, rule: MaskRule, key: int) -> PackedRow:
    """Guess the chosen tokens.

    Args:
        ids: at least [num_real] the row.
        ends: ascending exclusive ends of documents within the row, in 1..num_real.
        num_real: tokens of the row before padding.
        key: of this row, at this time.
    """
    original = ids[:num_real].astype(np.int64)
    draws = uniforms(key, 3 * num_real).reshape(3, num_real)
    chosen = (draws[0] < rule.probability) & rule.is_text[original]
    random_ids = rule.text_ids[(draws[2] * rule.text_ids.size).astype(np.int64)]
    seen = np.where(draws[1] < MASKED, rule.mask_id, np.where(draws[1] < REPLACED, random_ids, original))
    return PackedRow(
        decoder_ids=np.where(chosen, seen, original),
        labels=np.where(chosen, original, IGNORED_LABEL),
        lengths=document_lengths(ends, num_real),
    )
