"""What a trained model attends to in a text: the values behind `pretrain inspect attention`.

Takes a `Writer` and a text (for encoder-decoders also the target, written by the model when none is
given) -> maps, facts and warnings of every layer, with the tokens as words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from pretrain.data.batch import seq_info
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from pretrain.generate.prompts import Question
from pretrain.generate.sampling import SamplingOptions
from pretrain.generate.text import Writer, stream_ids
from pretrain.model.attention.observe import AttentionMap, HeadFacts, attention_maps, head_facts, warnings_of
from pretrain.sequence import IGNORED_LABEL, Batch, SeqInfo

MAX_TOKENS = 512  # a map of 512 x 512 for every head of every layer is as much as a picture can show
_TARGET_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Inspection:
    """Attention of one text.

    Attributes:
        maps: one per layer and kind, in the order in which the model computes them.
        facts: of each head.
        warnings: heads that have gone wrong, in words.
        source_words: tokens that the encoder reads; None without an encoder.
        words: tokens that the decoder (or the only stack) reads.
    """

    maps: list[AttentionMap]
    facts: list[HeadFacts]
    warnings: list[str]
    source_words: list[str] | None
    words: list[str]

    def labels(self, found: AttentionMap) -> tuple[list[str], list[str]]:
        """Words of the queries and of the keys of a map."""
        kind = found.name.partition(".")[0]
        if self.source_words is None:
            return self.words, self.words
        return (self.source_words if kind == "encoder" else self.words), (
            self.words if kind == "decoder" else self.source_words
        )


def inspect_attention(writer: Writer, text: Question | str, target: str | None = None) -> Inspection:
    """Runs the model over one text, in the form in which its objective trained it, and looks at every head.

    Args:
        text: a prompt or source; of an encoder, plain text.

    Raises:
        UserError: an empty text, more than 512 tokens, a target for a model without an encoder, or a target of none;
            a question that `make_prompt` refuses.
    """
    tokenizer, layout = writer.tokenizer, writer.config.layout
    ids = _ids(tokenizer, text, "prompt") if isinstance(text, str) and layout == "encoder" else _asked(writer, text)
    if layout != "encoder_decoder":
        if target is not None:
            raise UserError(
                f"--target={target!r} has no use. Only encoder-decoders read a target, and "
                f"model.family={writer.config.family} is none. Leave it out."
            )
        return _inspect(writer, _batch(ids, None, both_ways=writer.bidirectional), None, ids)
    if target is None:
        written = list(stream_ids(writer, text, sampling=SamplingOptions(), max_tokens=_TARGET_TOKENS))
    else:
        written = _ids(tokenizer, target, "target")
    target_ids = [tokenizer.start_id, *written]
    return _inspect(writer, _batch(target_ids, ids), ids, target_ids)


def _asked(writer: Writer, text: Question | str) -> list[int]:
    """What is fed for a text. Raises UserError for too much of it."""
    if isinstance(text, str):
        _ids(writer.tokenizer, text, "prompt")
    return list(_few(writer.prompt(text).ids, "prompt"))


def _inspect(writer: Writer, batch: Batch, source_ids: list[int] | None, ids: list[int]) -> Inspection:
    maps = attention_maps(writer.model, batch)
    if writer.config.layout == "decoder":  # a prompt that is seen in both directions looks like an encoder's text
        maps = [replace(found, name=f"decoder.{found.name.partition('.')[2]}") for found in maps]
    tokenizer = writer.tokenizer
    facts: list[HeadFacts] = []
    warnings: list[str] = []
    for found in maps:
        of_layer = head_facts(found)
        facts += of_layer
        warnings += warnings_of(found, of_layer)
    source_words = None if source_ids is None else _words(tokenizer, source_ids)
    return Inspection(maps, facts, warnings, source_words, _words(tokenizer, ids))


def _ids(tokenizer: Tokenizer, text: str, what: str) -> list[int]:
    ids: list[int] = tokenizer.encode_batch([text])[0].tolist()
    if not ids:
        raise UserError(f"the {what} is empty. Attention needs at least one token to look at. Give a text.")
    return list(_few(ids, what))


def _few(ids: Sequence[int], what: str) -> Sequence[int]:
    if len(ids) > MAX_TOKENS:
        raise UserError(
            f"the {what} has {len(ids)} tokens. A map is drawn for {MAX_TOKENS} at most. Give a shorter text."
        )
    return ids


def _words(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.decode([token]) or f"<{token}>" for token in ids]


def _batch(ids: list[int], source_ids: list[int] | None, *, both_ways: bool = False) -> Batch:
    length = np.array([len(ids)], dtype=np.int64)
    return Batch(
        index=0,
        decoder_ids=torch.tensor(ids),
        decoder_info=seq_info(length, prefixes=length if both_ways else None),
        labels=torch.full((len(ids),), IGNORED_LABEL),
        encoder_ids=None if source_ids is None else torch.tensor(source_ids),
        encoder_info=None if source_ids is None else SeqInfo.from_lengths([len(source_ids)]),
        dropout_key=0,
        target_tokens=0,
        target_bytes=0,
        digest=0,
    )
