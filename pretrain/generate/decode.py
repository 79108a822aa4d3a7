"""Decodes with a KV cache: prompts and what follows them, or the targets of sources; one by one or many at once.

Takes a model and ids → new ids, one token at a time. All families share the loop; they differ in what
the cache is made from and in the first ids that are fed (the prompt, or the start token).
Invariants (tested): the logits at every token equal those of a full forward pass over the same ids; a
sequence comes out the same whatever is decoded beside it. Several sequences are packed, so that no
padding is computed, and one that has ended leaves the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pretrain.errors import UserError
from pretrain.generate.sampling import SamplingOptions, choose
from pretrain.model.cache import Cache, documents


@runtime_checkable
class Decodes(Protocol):
    """What a model offers for decoding; encoder-decoders also have `encode`, and take its result for `new_cache`."""

    def new_cache(self, capacity: int, *of: object) -> Cache: ...

    def decode(
        self, ids_T: Int[Tensor, " T"], cache: Cache, counts: Sequence[int] | None = None
    ) -> Float[Tensor, "B V"]: ...


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

    def exclude(self, scores_BV: Float[Tensor, "B V"]) -> None:
        """Sets the scores of ids that never come out to -inf, in place."""
        scores_BV[:, list(self.banned_ids)] = float("-inf")
        if self.vocabulary_size is not None:
            scores_BV[:, self.vocabulary_size :] = float("-inf")


@dataclass(slots=True)
class Begun:
    """Sequences ready for their first new token.

    Attributes:
        cache: what the model has read of them.
        logits: [B, V] of the next token, at least fp32.
        alive: called before each token that is fed: who is slow says so.
    """

    model: Decodes
    cache: Cache
    logits: Tensor
    alive: Callable[[], None] | None = None

    def feed(self, ids: Sequence[int]) -> None:
        """Appends one token to each sequence."""
        if self.alive is not None:
            self.alive()
        with torch.inference_mode(), _evaluating(cast(nn.Module, self.model)):
            tokens = torch.tensor(list(ids), dtype=torch.int64, device=self.logits.device)
            self.logits = self.model.decode(tokens, self.cache).float()

    def select(self, rows: Sequence[int], *, same_sources: bool = False) -> None:
        """Keeps these sequences, in this order; for `same_sources` see `Cache.select`."""
        self.cache.select(rows, same_sources=same_sources)
        self.logits = self.logits[list(rows)]


def begin_prompts(
    model: nn.Module, prompts: Sequence[Sequence[int]], max_tokens: int, *, bidirectional: bool = False
) -> Begun:
    """Reads prompts with a decoder-only model.

    Args:
        max_tokens: that each may be continued by.
        bidirectional: tokens of a prompt see each other in both directions, as a prefix LM was trained.

    Raises:
        UserError: an empty prompt (give at least the end-of-text id), or more tokens than the model has positions.
    """
    if not all(prompts):
        raise UserError("the prompt has no token. A decoder needs something to continue. Give a prompt.")
    decoder, counts = cast(Decodes, model), [len(prompt) for prompt in prompts]
    cache = decoder.new_cache(max(counts) + max_tokens, len(prompts))
    cache.bidirectional_prompt = bidirectional
    with torch.inference_mode(), _evaluating(model):
        logits = decoder.decode(_joined(model, prompts), cache, counts).float()
    return Begun(decoder, cache, logits)


def begin_sources(model: nn.Module, sources: Sequence[Sequence[int]], start_id: int, max_tokens: int) -> Begun:
    """Reads sources with an encoder-decoder; each target begins with the start id.

    Raises:
        UserError: an empty source.
    """
    if not all(sources):
        raise UserError("the source has no token. An encoder-decoder needs something to read. Give a source text.")
    decoder, counts = cast(Decodes, model), [len(source) for source in sources]
    ids_T = _joined(model, sources)
    info = documents([0] * len(counts), counts, ids_T.device)
    with torch.inference_mode(), _evaluating(model):
        cache = decoder.new_cache(1 + max_tokens, model.encode(ids_T, info), info)
        logits = decoder.decode(_joined(model, [[start_id]] * len(counts)), cache).float()
    return Begun(decoder, cache, logits)


def continue_each(
    begun: Begun, sampling: SamplingOptions, stop: StopRule, *, seeds: Sequence[int] | None = None
) -> list[list[int]]:
    """New ids of every sequence, each until its own end.

    Args:
        seeds: of the draws of each sequence; `sampling.seed + i` if not given.

    Raises:
        UserError: logits that are not finite.
    """
    count = len(begun.cache.lengths)
    options = [replace(sampling, seed=seed) for seed in seeds or range(sampling.seed, sampling.seed + count)]
    found: list[list[int]] = [[] for _ in options]
    alive = list(range(len(options)))
    for position in range(stop.max_tokens):
        with torch.inference_mode():
            stop.exclude(begun.logits)
            chosen = [choose(scores, options[row], position) for row, scores in zip(alive, begun.logits, strict=True)]
        kept = [place for place, token in enumerate(chosen) if token != stop.end_id]
        for place in kept:
            found[alive[place]].append(chosen[place])
        if not kept or position + 1 == stop.max_tokens:
            break
        if len(kept) < len(alive):
            begun.select(kept)
            alive = [alive[place] for place in kept]
        begun.feed([found[row][-1] for row in alive])
    return found


def continue_ids(
    model: nn.Module,
    prompt_ids: Sequence[int],
    sampling: SamplingOptions,
    stop: StopRule,
    *,
    bidirectional: bool = False,
) -> Iterator[int]:
    """New ids after a prompt of a decoder-only model, as they are made. See `begin_prompts` for `bidirectional`.

    Raises:
        UserError: an empty prompt (give at least the end-of-text id), or logits that are not finite.
    """
    begun = begin_prompts(model, [prompt_ids], stop.max_tokens, bidirectional=bidirectional)
    return _stream(begun, sampling, stop)


def translate_ids(
    model: nn.Module, source_ids: Sequence[int], start_id: int, sampling: SamplingOptions, stop: StopRule
) -> Iterator[int]:
    """Ids of the target of one source, by an encoder-decoder, as they are made.

    Raises:
        UserError: an empty source, or logits that are not finite.
    """
    return _stream(begin_sources(model, [source_ids], start_id, stop.max_tokens), sampling, stop)


def _stream(begun: Begun, sampling: SamplingOptions, stop: StopRule) -> Iterator[int]:
    for position in range(stop.max_tokens):
        with torch.inference_mode():
            stop.exclude(begun.logits)
            chosen = choose(begun.logits[0], sampling, position)
        if chosen == stop.end_id:
            return
        yield chosen
        if position + 1 < stop.max_tokens:
            begun.feed([chosen])


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


def _joined(model: nn.Module, sequences: Sequence[Sequence[int]]) -> Tensor:
    device = next(model.parameters()).device
    return torch.tensor([token for ids in sequences for token in ids], dtype=torch.int64, device=device)
