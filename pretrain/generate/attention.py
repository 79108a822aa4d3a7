"""What a trained model attends to in a text: the values behind `pretrain inspect attention`.

Takes a model, its tokenizer and a text (for encoder-decoders also the target, written by the model when none is
given) -> maps, facts and warnings of every layer, with the tokens as words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from pretrain.config.schema import AnyModelConfig
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
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


def inspect_attention(
    model: nn.Module, config: AnyModelConfig, tokenizer: Tokenizer, text: str, target: str | None = None
) -> Inspection:
    """Runs the model over one text and looks at every head.

    Raises:
        UserError: an empty text, more than 512 tokens, a target for a model without an encoder, or a target of none.
    """
    ids = _ids(tokenizer, text, "prompt")
    if config.layout != "encoder_decoder":
        if target is not None:
            raise UserError(
                f"--target={target!r} has no use. Only encoder-decoders read a target, and "
                f"model.family={config.family} is none. Leave it out."
            )
        return _inspect(model, tokenizer, _batch(ids, None), None, ids)
    ids = [*ids, tokenizer.eos_id]
    if target is None:
        writer = Writer(model, config, tokenizer)
        written = list(stream_ids(writer, text, sampling=SamplingOptions(), max_tokens=_TARGET_TOKENS))
    else:
        written = _ids(tokenizer, target, "target")
    target_ids = [tokenizer.start_id, *written]
    return _inspect(model, tokenizer, _batch(target_ids, ids), ids, target_ids)


def _inspect(
    model: nn.Module, tokenizer: Tokenizer, batch: Batch, source_ids: list[int] | None, ids: list[int]
) -> Inspection:
    maps = attention_maps(model, batch)
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
    if len(ids) > MAX_TOKENS:
        raise UserError(
            f"the {what} has {len(ids)} tokens. A map is drawn for {MAX_TOKENS} at most. Give a shorter text."
        )
    return ids


def _words(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.decode([token]) or f"<{token}>" for token in ids]


def _batch(ids: list[int], source_ids: list[int] | None) -> Batch:
    return Batch(
        index=0,
        decoder_ids=torch.tensor(ids),
        decoder_info=SeqInfo.from_lengths([len(ids)]),
        labels=torch.full((len(ids),), IGNORED_LABEL),
        encoder_ids=None if source_ids is None else torch.tensor(source_ids),
        encoder_info=None if source_ids is None else SeqInfo.from_lengths([len(source_ids)]),
        dropout_key=0,
        target_tokens=0,
        target_bytes=0,
        digest=0,
    )
