"""The objective section of a config: one class per kind, what each asks of a row."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pretrain.config.section import Section, setting
from pretrain.config.units import Count, Flag, Fraction, PositiveInt, PositiveReal


class CausalLMObjective(Section):
    """Predict the next token; documents are isolated from each other."""

    kind: Literal["causal_lm"] = "causal_lm"


class Seq2SeqObjective(Section):
    """Predict the target from the source, teacher-forced; needs pair sources."""

    kind: Literal["seq2seq"] = "seq2seq"


class MaskedLMObjective(Section):
    """Guess masked tokens from both sides: of those chosen, 80 % become the mask id, 10 % a random token, 10 % stay."""

    kind: Literal["masked_lm"] = "masked_lm"
    mask_probability: Fraction = setting(
        "share of a document's tokens that are guessed; its end is never one of them",
        resume="logged",
        default=0.15,
        gt=0,
        lt=1,
    )
    mask_id: Count | None = setting(
        "id that stands for a masked token; none means the last of model.vocabulary_size, which must then be above the "
        "tokenizer's vocabulary",
        resume="refused",
        default=None,
    )


_BIDIRECTIONAL = (
    "decoders only: tokens of the part that is given see each other in both directions; false keeps it causal"
)
_SHORTEST = (
    "documents of fewer text tokens (pieces that the edges of a row leave included) are {}; the worst case that rows "
    "must have room for falls with it"
)


class PrefixLMObjective(Section):
    """Continue a document from a place drawn uniformly: what stands before it is given, only the rest is predicted."""

    kind: Literal["prefix_lm"] = "prefix_lm"
    bidirectional_prefix: Flag = setting(_BIDIRECTIONAL, resume="logged", default=True)


class FillInTheMiddleObjective(Section):
    """Next-token prediction in which some documents are rearranged, so that their middle comes last.

    The two cuts are uniform over the tokens' borders. Needs `pretrain tokenizer train --fill-in-the-middle`.
    """

    kind: Literal["fill_in_the_middle"] = "fill_in_the_middle"
    rate: Fraction = setting(
        "share of the documents that are rearranged; the others stay", resume="logged", default=0.5
    )
    spm_rate: Fraction = setting(
        "share of those that come as suffix, prefix, middle; the rest as prefix, suffix, middle",
        resume="logged",
        default=0.5,
    )
    min_document_tokens: PositiveInt = setting(_SHORTEST.format("never rearranged"), resume="logged", default=16)


class SpanCorruptionObjective(Section):
    """Spans of a document are replaced by sentinels and predicted after them, as for T5.

    Needs `pretrain tokenizer train --sentinels N`.
    """

    kind: Literal["span_corruption"] = "span_corruption"
    noise_density: Fraction = setting(
        "share of a document's tokens that is predicted", resume="logged", default=0.15, gt=0, lt=1
    )
    mean_span_tokens: PositiveReal = setting("mean length of a span, at least 1", resume="logged", default=3.0, ge=1)
    min_document_tokens: PositiveInt = setting(_SHORTEST.format("left out"), resume="logged", default=16, ge=2)
    bidirectional_prefix: Flag = setting(_BIDIRECTIONAL, resume="logged", default=True)


class DenoiserConfig(Section):
    """One of the tasks that UL2 mixes."""

    mode: Literal["R", "S", "X"] = setting(
        "the mode token in front: R regular, X extreme (both hide spans), S sequential (hides the end)",
        resume="logged",
    )
    noise_density: Fraction = setting("share of a document's tokens that is predicted", resume="logged", gt=0, lt=1)
    mean_span_tokens: PositiveReal | None = setting(
        "mean length of a span, at least 1 (R and X); S has the one at the end", resume="logged", default=None, ge=1
    )
    weight: PositiveReal = setting("share of the documents, relative to the others", resume="logged", default=1.0)


# The seven of Tay et al. 2022, table 1, mixed equally.
_UL2_DENOISERS: dict[str, dict[str, Any]] = {
    "r3": {"mode": "R", "noise_density": 0.15, "mean_span_tokens": 3},
    "r8": {"mode": "R", "noise_density": 0.15, "mean_span_tokens": 8},
    "s": {"mode": "S", "noise_density": 0.25},
    "x3": {"mode": "X", "noise_density": 0.5, "mean_span_tokens": 3},
    "x8": {"mode": "X", "noise_density": 0.5, "mean_span_tokens": 8},
    "x64": {"mode": "X", "noise_density": 0.15, "mean_span_tokens": 64},
    "x64half": {"mode": "X", "noise_density": 0.5, "mean_span_tokens": 64},
}


class UL2Objective(Section):
    """A mixture of denoising tasks, one drawn for each document and named by a mode token in front.

    Needs `pretrain tokenizer train --sentinels N --modes`.
    """

    kind: Literal["ul2"] = "ul2"
    denoisers: dict[str, DenoiserConfig] = setting(
        "the tasks by name; the draw depends on the names", resume="logged", default=_UL2_DENOISERS, min_length=1
    )
    min_document_tokens: PositiveInt = setting(_SHORTEST.format("left out"), resume="logged", default=16, ge=2)
    bidirectional_prefix: Flag = setting(_BIDIRECTIONAL, resume="logged", default=True)


AnyObjective = (
    CausalLMObjective
    | Seq2SeqObjective
    | MaskedLMObjective
    | PrefixLMObjective
    | FillInTheMiddleObjective
    | SpanCorruptionObjective
    | UL2Objective
)
ObjectiveConfig = Annotated[AnyObjective, Field(discriminator="kind")]
