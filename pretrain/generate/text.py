"""Text in, text out: a trained model continues prompts, fills gaps, or writes the targets of sources.

Takes a `Writer` (model, tokenizer, and how it was trained to be asked) and texts → new texts and their ids. One
way for all families and for many texts at once; used by `pretrain generate`, by evaluation, and for
samples during training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from pretrain.config.objectives import AnyObjective
from pretrain.config.schema import AnyModelConfig
from pretrain.data.tokenizer import Tokenizer
from pretrain.generate.beam import BeamOptions, beam_search
from pretrain.generate.decode import (
    Begun,
    StopRule,
    begin_prompts,
    begin_sources,
    continue_each,
    continue_ids,
    translate_ids,
)
from pretrain.generate.prompts import Prompt, Question, answers_by_gap, make_prompt, spelt_with_sentinels
from pretrain.generate.sampling import SamplingOptions

_TEXTS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Writer:
    """What writes.

    Attributes:
        config: of the model.
        objective: that it was trained by, which says how it is asked; None where nobody knows.
    """

    model: nn.Module
    config: AnyModelConfig
    tokenizer: Tokenizer
    objective: AnyObjective | None = None

    @property
    def reads_sources(self) -> bool:
        return self.config.layout == "encoder_decoder"

    @property
    def bidirectional(self) -> bool:
        """A decoder that was trained to see its prompt in both directions."""
        return self.config.layout == "decoder" and bool(getattr(self.objective, "bidirectional_prefix", False))

    def stop_rule(self, max_tokens: int) -> StopRule:
        """The tokenizer's end ends a text; padding and start never come out; sentinels may, being part of answers."""
        tokenizer = self.tokenizer
        banned = {tokenizer.pad_id, tokenizer.start_id} - {tokenizer.eos_id}
        return StopRule(max_tokens, tokenizer.eos_id, tuple(sorted(banned)), tokenizer.vocabulary_size)

    def prompt(self, question: Question | str) -> Prompt:
        """What is fed for a question, or for a text without more. Raises as `make_prompt` does."""
        question = Question(question) if isinstance(question, str) else question
        return make_prompt(question, self.tokenizer, self.config, self.objective)

    def begin(self, ids: Sequence[Sequence[int]], max_tokens: int) -> Begun:
        """Reads several prompts or sources."""
        if self.reads_sources:
            return begin_sources(self.model, ids, self.tokenizer.start_id, max_tokens)
        return begin_prompts(self.model, ids, max_tokens, bidirectional=self.bidirectional)


@dataclass(frozen=True, slots=True)
class Generated:
    """What a model wrote.

    Attributes:
        text: the new text, without the prompt or source; where gaps were marked, with the names of sentinels in it.
        ids: its ids, without the end-of-text id.
        ended: the model ended the text itself, rather than running into `max_tokens`.
        score: of a beam, else None.
        gaps: what belongs into each gap, None for one that the model left out; empty where nothing was marked.
    """

    text: str
    ids: tuple[int, ...]
    ended: bool
    score: float | None = None
    gaps: tuple[str | None, ...] = ()


def write_texts(
    writer: Writer,
    questions: Sequence[Question | str],
    *,
    max_tokens: int,
    sampling: SamplingOptions | None = None,
    beams: BeamOptions | None = None,
    alive: Callable[[], None] | None = None,
) -> Iterator[Generated]:
    """What the model answers to each, in their order, some at once; greedy without options.

    Args:
        sampling: text i draws with the seed `sampling.seed + i`.
        beams: searches instead of sampling.
        alive: called for each token.

    Raises:
        UserError: a question that `make_prompt` refuses, no token allowed, more than the model has positions for,
            logits that are not finite.
    """
    prompts = [writer.prompt(question) for question in questions]
    stop, options = writer.stop_rule(max_tokens), sampling or SamplingOptions()
    order = sorted(
        range(len(prompts)), key=lambda i: len(prompts[i].ids)
    )  # those of a group end at about the same time
    found: dict[int, Generated] = {}
    for first in range(0, len(order), _TEXTS_AT_ONCE):
        group = sorted(order[first : first + _TEXTS_AT_ONCE])
        begun = writer.begin([prompts[i].ids for i in group], max_tokens)
        begun.alive = alive
        if beams is not None:
            for i, kept in zip(group, beam_search(begun, beams, stop), strict=True):
                found[i] = answer_of(writer, prompts[i], kept[0].ids, kept[0].ended, kept[0].score)
        else:
            seeds = [options.seed + i for i in group]
            for i, ids in zip(group, continue_each(begun, options, stop, seeds=seeds), strict=True):
                found[i] = answer_of(writer, prompts[i], ids, ended=len(ids) < max_tokens)
    yield from (found[i] for i in range(len(prompts)))


def generate_text(writer: Writer, question: Question | str, *, sampling: SamplingOptions, max_tokens: int) -> Generated:
    """The answer to one question.

    Raises:
        UserError: as `write_texts`.
    """
    ids = list(stream_ids(writer, question, sampling=sampling, max_tokens=max_tokens))
    return answer_of(writer, writer.prompt(question), ids, ended=len(ids) < max_tokens)


def stream_ids(
    writer: Writer, question: Question | str, *, sampling: SamplingOptions, max_tokens: int
) -> Iterator[int]:
    """The ids of `generate_text` one by one, as they are made. Raises as it does."""
    ids, stop = writer.prompt(question).ids, writer.stop_rule(max_tokens)
    if writer.reads_sources:
        return translate_ids(writer.model, ids, writer.tokenizer.start_id, sampling, stop)
    return continue_ids(writer.model, ids, sampling, stop, bidirectional=writer.bidirectional)


def answer_of(writer: Writer, prompt: Prompt, ids: Sequence[int], ended: bool, score: float | None = None) -> Generated:
    """What ids say that a model wrote after a prompt."""
    tokenizer = writer.tokenizer
    if not prompt.sentinels:
        return Generated(tokenizer.decode(ids), tuple(ids), ended, score)
    gaps = answers_by_gap(ids, prompt.sentinels, tokenizer)
    return Generated(spelt_with_sentinels(ids, tokenizer), tuple(ids), ended, score, gaps)
