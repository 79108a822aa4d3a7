"""Text in, text out: a trained model continues prompts, fills gaps, or writes the targets of sources.

Takes a `Writer` (model, tokenizer, and how it was trained to be asked) and texts → new texts and their ids. One
way for all families and for many texts at once; used by `pretrain generate`, by evaluation, and for
samples during training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from pretrain.config.schema import AnyModelConfig
from pretrain.data.special_tokens import fim_markers
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
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
from pretrain.generate.sampling import SamplingOptions

_TEXTS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Writer:
    """What writes.

    Attributes:
        config: of the model.
        bidirectional: a decoder was trained to see its prompt in both directions (prefix LM).
    """

    model: nn.Module
    config: AnyModelConfig
    tokenizer: Tokenizer
    bidirectional: bool = False

    @property
    def reads_sources(self) -> bool:
        return self.config.layout == "encoder_decoder"

    def stop_rule(self, max_tokens: int) -> StopRule:
        """The tokenizer's end ends a text; padding and start never come out; sentinels may, being part of answers."""
        tokenizer = self.tokenizer
        banned = {tokenizer.pad_id, tokenizer.start_id} - {tokenizer.eos_id}
        return StopRule(max_tokens, tokenizer.eos_id, tuple(sorted(banned)), tokenizer.vocabulary_size)

    def ids_of(self, text: str) -> list[int]:
        """What is fed for a text.

        Raises:
            UserError: the family writes nothing, or the text is empty.
        """
        if self.config.layout == "encoder":
            raise UserError(
                f"model.family={self.config.family} writes no text. An encoder sees both sides of a gap and continues "
                "nothing. Generate from a run of a decoder or an encoder-decoder."
            )
        if not text:
            kind = "source" if self.reads_sources else "prompt"
            raise UserError(f"the {kind} is empty. The model needs at least one token to start from. Give a text.")
        ids: list[int] = self.tokenizer.encode_batch([text])[0].tolist()
        return [*ids, self.tokenizer.eos_id] if self.reads_sources else ids

    def gap_ids(self, prefix: str, suffix: str) -> list[int]:
        """What is fed for a gap between two texts, either of which may be empty.

        Raises:
            UserError: no decoder.
            DataError: the tokenizer has no markers for gaps.
        """
        if self.config.layout != "decoder":
            raise UserError(
                f"--suffix does not fit model.family={self.config.family}. Decoders that were trained with "
                "objective.kind=fill_in_the_middle fill gaps. Leave --suffix out."
            )
        mark = fim_markers(self.tokenizer.special_ids)
        before, behind = (ids.tolist() for ids in self.tokenizer.encode_batch([prefix, suffix]))
        return [mark.prefix, *before, mark.suffix, *behind, mark.middle]

    def begin(self, ids: Sequence[Sequence[int]], max_tokens: int) -> Begun:
        """Reads several prompts or sources."""
        if self.reads_sources:
            return begin_sources(self.model, ids, self.tokenizer.start_id, max_tokens)
        return begin_prompts(self.model, ids, max_tokens, bidirectional=self.bidirectional)


@dataclass(frozen=True, slots=True)
class Generated:
    """What a model wrote.

    Attributes:
        text: the new text, without the prompt or source.
        ids: its ids, without the end-of-text id.
        ended: the model ended the text itself, rather than running into `max_tokens`.
        score: of a beam, else None.
    """

    text: str
    ids: tuple[int, ...]
    ended: bool
    score: float | None = None


def write_texts(
    writer: Writer,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: SamplingOptions | None = None,
    beams: BeamOptions | None = None,
) -> Iterator[Generated]:
    """What follows each prompt or source, in their order, some at once; greedy without options.

    Args:
        prompts: as `Writer.ids_of` or `gap_ids` give them.
        sampling: text i draws with the seed `sampling.seed + i`.
        beams: searches instead of sampling.

    Raises:
        UserError: no token allowed, more than the model has positions for, logits that are not finite.
    """
    stop, options = writer.stop_rule(max_tokens), sampling or SamplingOptions()
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # texts of a group end at about the same time
    found: dict[int, Generated] = {}
    for first in range(0, len(order), _TEXTS_AT_ONCE):
        group = sorted(order[first : first + _TEXTS_AT_ONCE])
        begun = writer.begin([prompts[i] for i in group], max_tokens)
        if beams is not None:
            for i, kept in zip(group, beam_search(begun, beams, stop), strict=True):
                best = kept[0]
                found[i] = Generated(writer.tokenizer.decode(best.ids), best.ids, best.ended, best.score)
        else:
            seeds = [options.seed + i for i in group]
            for i, ids in zip(group, continue_each(begun, options, stop, seeds=seeds), strict=True):
                found[i] = Generated(writer.tokenizer.decode(ids), tuple(ids), ended=len(ids) < max_tokens)
    yield from (found[i] for i in range(len(prompts)))


def generate_text(writer: Writer, text: str, *, sampling: SamplingOptions, max_tokens: int) -> Generated:
    """Continues a prompt (decoders) or writes the target of a source (encoder-decoders).

    Raises:
        UserError: an encoder, an empty text, no token allowed, more than the model has positions for, logits that are
            not finite.
    """
    ids = tuple(stream_ids(writer, text, sampling=sampling, max_tokens=max_tokens))
    return Generated(writer.tokenizer.decode(ids), ids, ended=len(ids) < max_tokens)


def stream_ids(writer: Writer, text: str, *, sampling: SamplingOptions, max_tokens: int) -> Iterator[int]:
    """The ids of `generate_text` one by one, as they are made. Raises as it does."""
    ids, stop = writer.ids_of(text), writer.stop_rule(max_tokens)
    if writer.reads_sources:
        return translate_ids(writer.model, ids, writer.tokenizer.start_id, sampling, stop)
    return continue_ids(writer.model, ids, sampling, stop, bidirectional=writer.bidirectional)
