"""Decodes with a KV cache: a prompt and what follows it, or the target of a source.

Takes a model and ids → new ids, one token at a time. Both families share the loop; they differ in what
the cache is made from and in the first ids that are fed (the prompt, or the start token).
Invariant (tested): the logits at every token equal those of a full forward pass over the same ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pretrain.errors import UserError
from pretrain.generate.sampling import SamplingOptions, choose
from pretrain.model.cache import Cache


@runtime_checkable
class Decodes(Protocol):
    """What a model offers for decoding; encoder-decoders also have `encode`."""

    def new_cache(self, capacity: int, *source: Tensor) -> Cache: ...

    def decode(self, ids_T: Int[Tensor, " T"], cache: Cache) -> Float[Tensor, " V"]: ...


@dataclass(frozen=True, slots=True)
class StopRule:
    """When a continuation ends.

    Attributes:
        max_tokens: new tokens at most, >= 1.
        end_id: id that ends the text; not part of the result. None means only `max_tokens` ends it.
        banned_ids: ids that never come out (padding, start).
        vocabulary_size: ids that the tokenizer knows; a model may have more outputs, which never come out.
    """

    max_tokens: int
    end_id: int | None = None
    banned_ids: tuple[int, ...] = ()
    vocabulary_size: int | None = None

    def __post_init__(self) -> None:
        """Raises UserError when no token may be made."""
        if self.max_tokens < 1:
            raise UserError(
                f"max_tokens={self.max_tokens} allows no token. It must be at least 1. Set --max-tokens 100."
            )


def continue_ids(
    model: nn.Module, prompt_ids: Sequence[int], sampling: SamplingOptions, stop: StopRule
) -> Iterator[int]:
    """New ids after a prompt of a decoder-only model, as they are made.

    Raises:
        UserError: an empty prompt (give at least the end-of-text id), or logits that are not finite.
    """
    if not prompt_ids:
        raise UserError("the prompt has no token. A decoder needs something to continue. Give a prompt.")
    decoder = cast(Decodes, model)
    cache = decoder.new_cache(len(prompt_ids) + stop.max_tokens)
    return _decode(model, cache, prompt_ids, sampling, stop)


def translate_ids(
    model: nn.Module, source_ids: Sequence[int], start_id: int, sampling: SamplingOptions, stop: StopRule
) -> Iterator[int]:
    """Ids of the target of one source, by an encoder-decoder, as they are made.

    Raises:
        UserError: an empty source, or logits that are not finite.
    """
    if not source_ids:
        raise UserError("the source has no token. An encoder-decoder needs something to read. Give a source text.")
    with torch.inference_mode(), _evaluating(model):
        encoded_TD = model.encode(_tensor(model, source_ids))
    cache = cast(Decodes, model).new_cache(1 + stop.max_tokens, encoded_TD)
    return _decode(model, cache, [start_id], sampling, stop)


def _decode(
    model: nn.Module, cache: Cache, first_ids: Sequence[int], sampling: SamplingOptions, stop: StopRule
) -> Iterator[int]:
    decoder = cast(Decodes, model)
    ids = list(first_ids)
    for position in range(stop.max_tokens):
        with torch.inference_mode(), _evaluating(model):
            logits_V = decoder.decode(_tensor(model, ids), cache).float()
            logits_V[list(stop.banned_ids)] = float("-inf")
            if stop.vocabulary_size is not None:
                logits_V[stop.vocabulary_size :] = float("-inf")
            chosen = choose(logits_V, sampling, position)
        if chosen == stop.end_id:
            return
        yield chosen
        ids = [chosen]


class _evaluating:  # noqa: N801 - reads as a word in `with`
    """Dropout off inside, each module's mode as it was outside: sampling in the middle of training is harmless."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [module for module in model.modules() if module.training]

    def __enter__(self) -> None:
        for module in self._modules:
            module.training = False

    def __exit__(self, *_: object) -> None:
        for module in self._modules:
            module.training = True


def _tensor(model: nn.Module, ids: Sequence[int]) -> Tensor:
    device = next(model.parameters()).device
    return torch.tensor(list(ids), dtype=torch.int64, device=device)
