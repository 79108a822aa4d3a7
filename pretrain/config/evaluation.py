"""The eval section of a config: what is measured while a run trains, by its ranks or beside them."""

from __future__ import annotations

from pretrain.config.section import Section, setting
from pretrain.config.units import Flag, Location, NonNegativeReal, PositiveInt, PositiveReal, Text


class TranslationEvalConfig(Section):
    """Translations of held-out pairs inside the run, scored by BLEU and chrF (needs pretrain[translation])."""

    pairs: Location = setting("file of JSON lines with held-out pairs", resume="free")
    every_steps: PositiveInt = setting("steps between translations; the last step has them as well", resume="free")
    source_field: Text = setting("field of the source text", resume="free", default="source")
    target_field: Text = setting("field of the reference", resume="free", default="target")
    max_pairs: PositiveInt = setting("the first pairs that are translated, over all ranks", resume="free", default=200)
    max_tokens: PositiveInt = setting("tokens of a translation at most", resume="free", default=128)
    num_beams: PositiveInt = setting("beams of the search; 1 means greedy", resume="free", default=1)
    length_penalty: NonNegativeReal = setting(
        "exponent of ((5 + tokens) / 6) that a beam's log-probability is divided by", resume="free", default=0.6
    )


class SamplesEvalConfig(Section):
    """What the model writes for some prompts inside the run, for people to look at; rank 0 writes, on its CPU."""

    prompts: list[Text] = setting("texts to continue; sources of encoder-decoders", resume="free", min_length=1)
    every_steps: PositiveInt = setting("steps between samples; the last step has them as well", resume="free")
    max_tokens: PositiveInt = setting("tokens of a text at most", resume="free", default=64)
    temperature: NonNegativeReal = setting("divides the logits; 0 means greedy", resume="free", default=0.8)
    top_p: PositiveReal = setting(
        "only the most likely tokens whose probability reaches it", resume="free", default=0.95, le=1.0
    )
    gap: Text | None = setting(
        "text that marks a gap in the prompts (objectives span_corruption and ul2); none means no gaps",
        resume="free",
        default=None,
    )
    attention_maps: Flag = setting(
        "draw what the heads look at in the first prompt, as plots/attention-step-….png", resume="free", default=False
    )


class CheckpointEvalConfig(Section):
    """Every checkpoint is measured by a process of its own on a spare slot (cluster.spare_ranks) while the ranks train:
    losses of data.validation, and the translations of eval.translation. On the CPU, in fp32, at low priority."""

    average: PositiveInt = setting(
        "weights that are measured: the mean of so many checkpoints, each with those before it; 1 means itself alone",
        resume="free",
        default=1,
    )
    finish_s: NonNegativeReal = setting(
        "seconds that a completed run waits for the measures of its last checkpoint", resume="free", default=1800.0
    )


class EvalConfig(Section):
    """Validation inside the run; it never disturbs training state."""

    every_steps: PositiveInt | None = setting(
        "steps between validations; none means never", resume="free", default=None
    )
    max_rows: PositiveInt | None = setting(
        "validation rows per source, the same each time; none means all", resume="free", default=None
    )
    translation: TranslationEvalConfig | None = setting(
        "translations of held-out pairs with their scores; none means never", resume="free", default=None
    )
    samples: SamplesEvalConfig | None = setting(
        "what the model writes for some prompts; none means never", resume="free", default=None
    )
    checkpoints: CheckpointEvalConfig | None = setting(
        "measure every checkpoint beside the training; none means never", resume="free", default=None
    )
