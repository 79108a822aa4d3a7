"""Text in, text out: a trained model continues a prompt, or writes the target of a source.

Takes a model, its tokenizer and a text → the new text and its ids. One function for both families, used by
`pretrain generate` and for samples during training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from pretrain.config.schema import AnyModelConfig
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from pretrain.generate.decode import StopRule, continue_ids, translate_ids
from pretrain.generate.sampling import SamplingOptions


@dataclass(frozen=True, slots=True)
class Generated:
    """What a model wrote.

    Attributes:
        text: the new text, without the prompt or source.
        ids: its ids, without the end-of-text id.
        ended: the model ended the text itself, rather than running into `max_tokens`.
    """

    text: str
    ids: tuple[int, ...]
    ended: bool


def generate_text(
    model: nn.Module,
    config: AnyModelConfig,
    tokenizer: Tokenizer,
    text: str,
    *,
    sampling: SamplingOptions,
    max_tokens: int,
) -> Generated:
    """Continues a prompt (decoders) or writes the target of a source (encoder-decoders).

    Raises:
        UserError: an encoder, an empty text, no token allowed, more than the model has positions for, logits that are
            not finite.
    """
    ids = tuple(stream_ids(model, config, tokenizer, text, sampling=sampling, max_tokens=max_tokens))
    return Generated(tokenizer.decode(ids), ids, ended=len(ids) < max_tokens)


def stream_ids(
    model: nn.Module,
    config: AnyModelConfig,
    tokenizer: Tokenizer,
    text: str,
    *,
    sampling: SamplingOptions,
    max_tokens: int,
) -> Iterator[int]:
    """The ids of `generate_text` one by one, as they are made. Raises as it does."""
    if config.layout == "encoder":
        raise UserError(
            f"model.family={config.family} writes no text. An encoder sees both sides of a gap and continues nothing. "
            "Generate from a run of a decoder or an encoder-decoder."
        )
    kind = "source" if config.layout == "encoder_decoder" else "prompt"
    if not text:
        raise UserError(f"the {kind} is empty. The model needs at least one token to start from. Give a text.")
    special = {tokenizer.eos_id, tokenizer.pad_id, tokenizer.start_id} - {tokenizer.eos_id}
    stop = StopRule(max_tokens, tokenizer.eos_id, tuple(sorted(special)), tokenizer.vocabulary_size)
    ids = tokenizer.encode_batch([text])[0].tolist()
    if config.layout == "encoder_decoder":
        return translate_ids(model, [*ids, tokenizer.eos_id], tokenizer.start_id, sampling, stop)
    return continue_ids(model, ids, sampling, stop)
