"""BLEU and chrF of translations, as everybody computes them: by sacrebleu, with its signature beside the number.

Takes hypotheses and references → scores from 0 to 100. sacrebleu is an extra: it is imported here only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pretrain.errors import UserError


@dataclass(frozen=True, slots=True)
class TranslationScores:
    """Scores of a corpus.

    Attributes:
        bleu, chrf: 0 to 100.
        bleu_signature, chrf_signature: exactly what was computed, to be quoted with the numbers.
        sentences: how many were compared.
    """

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str
    sentences: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def translation_scores(hypotheses: Sequence[str], references: Sequence[str]) -> TranslationScores:
    """Of one hypothesis and one reference per sentence.

    Raises:
        UserError: sacrebleu is not installed, or there is nothing to compare.
    """
    if not references or len(hypotheses) != len(references):
        raise UserError(
            f"{len(hypotheses)} translations and {len(references)} references cannot be compared. Each needs the "
            "other. Give at least one pair."
        )
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError:
        raise UserError(
            "BLEU and chrF are computed by sacrebleu, which is not installed. Install pretrain[translation]."
        ) from None
    bleu, chrf = BLEU(), CHRF()
    bleu_score = bleu.corpus_score(list(hypotheses), [list(references)])
    chrf_score = chrf.corpus_score(list(hypotheses), [list(references)])
    return TranslationScores(
        bleu=float(bleu_score.score),
        chrf=float(chrf_score.score),
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
        sentences=len(references),
    )
