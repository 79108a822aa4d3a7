"""Beam search with a KV cache: the best of several continuations by their log-probability and length.

Takes sequences that are begun → the best ended ones of each, with scores. One that ends among the best
`num_beams` of a step is kept; the search of a sentence is over when none that still grows can do better.
Two rules of scoring, by name:
  paper         log P / ((5 + n) / 6)^alpha, n new tokens with the end; stops only when nothing that still grows
                could win at any length. Wu et al. 2016, equation 14, which Vaswani et al. 2017 use with alpha 0.6
  transformers  log P / n^alpha, which stops when nothing could win at its present length; as their generate()
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from pretrain.errors import UserError
from pretrain.generate.decode import Begun, StopRule

ScoreRule = Literal["paper", "transformers"]


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """How the search is done.

    Attributes:
        num_beams: continuations that are followed at once, and that are kept.
        alpha: weight of the length; 0 prefers short ones as the probability does.
        rule: the formula of the score.
    """

    num_beams: int = 4
    alpha: float = 0.6
    rule: ScoreRule = "paper"

    def __post_init__(self) -> None:
        """Raises UserError for a value outside its range."""
        if self.num_beams < 1:
            raise UserError(f"num_beams={self.num_beams} follows nothing. It must be at least 1. Set --beams 4.")
        if not 0 <= self.alpha < float("inf"):
            raise UserError(f"alpha={self.alpha} is not a number >= 0. The paper has 0.6. Set --length-penalty 0.6.")

    def score(self, log_probability: float, num_tokens: int) -> float:
        """Of a continuation of so many new tokens, its end included."""
        length = (5 + num_tokens) / 6 if self.rule == "paper" else num_tokens
        return float(log_probability / length**self.alpha)

    def bound(self, log_probability: float, num_tokens: int, max_tokens: int) -> float:
        """The best score that one which is still growing is taken to reach."""
        return self.score(log_probability, max_tokens if self.rule == "paper" else num_tokens)


@dataclass(frozen=True, slots=True)
class Beam:
    """One continuation: ids without the end, its score, and whether it ended itself."""

    ids: tuple[int, ...]
    score: float
    ended: bool


@dataclass(slots=True)
class _Sentence:
    """The search of one sequence: what grows (best first) and what was kept (best first)."""

    number: int
    growing: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    kept: list[Beam] = field(default_factory=list)

    def keep(self, beam: Beam, limit: int) -> None:
        self.kept = sorted([*self.kept, beam], key=lambda kept: -kept.score)[:limit]

    def is_over(self, options: BeamOptions, num_tokens: int, max_tokens: int) -> bool:
        if num_tokens == max_tokens:
            return True
        if len(self.kept) < options.num_beams:
            return False
        return options.bound(self.growing[0][0], num_tokens, max_tokens) <= self.kept[-1].score


def beam_search(begun: Begun, options: BeamOptions, stop: StopRule) -> list[list[Beam]]:
    """The best continuations of every sequence, at most `num_beams` of each, best first.

    Raises:
        UserError: logits that are not finite.
    """
    count = len(begun.cache.lengths)
    found: list[list[Beam]] = [[] for _ in range(count)]
    searches = [_Sentence(number, [(0.0, ())]) for number in range(count)]
    for num_tokens in range(1, stop.max_tokens + 1):
        width = len(searches[0].growing)  # 1 at first, then all beams
        rows = []
        best = _best(begun.logits, searches, width, options, stop)
        for place, (search, (scores, choices)) in enumerate(zip(searches, best, strict=True)):
            parents = _grow(search, scores, choices, options, stop, num_tokens)
            rows.append([width * place + parent for parent in parents])
        open_ = [i for i, search in enumerate(searches) if not search.is_over(options, num_tokens, stop.max_tokens)]
        for search in searches:
            found[search.number] = search.kept
        if not open_:
            break
        in_place = len(open_) == len(searches) and all(len(row) == width for row in rows)
        begun.select([row for i in open_ for row in rows[i]], same_sources=in_place)
        searches = [searches[i] for i in open_]
        begun.feed([ids[-1] for search in searches for _, ids in search.growing])
    return found


def _best(
    logits_BV: Tensor, searches: list[_Sentence], width: int, options: BeamOptions, stop: StopRule
) -> list[tuple[list[float], list[tuple[int, int]]]]:
    """Per sentence the best 2 x num_beams continuations, best first: log-probabilities, and (parent, id)."""
    with torch.inference_mode():
        scores_BV = torch.log_softmax(logits_BV, dim=-1)
        if not bool(torch.isfinite(scores_BV.max(dim=-1).values).all()):
            raise UserError(
                "the model's logits are not finite. Its weights are broken or the run diverged. "
                "Use an earlier checkpoint."
            )
        stop.exclude(scores_BV)
        so_far = torch.tensor([[score for score, _ in search.growing] for search in searches], dtype=scores_BV.dtype)
        total = scores_BV.unflatten(0, (len(searches), width)) + so_far.to(scores_BV.device)[:, :, None]
        # Twice as many as are followed: if all of the best end, as many are left to go on.
        best = total.flatten(1).topk(min(2 * options.num_beams, total[0].numel()), dim=-1)
    vocabulary = scores_BV.shape[1]
    choices = [[divmod(number, vocabulary) for number in row] for row in best.indices.tolist()]
    return list(zip(best.values.tolist(), choices, strict=True))


def _grow(
    search: _Sentence,
    scores: list[float],
    choices: list[tuple[int, int]],
    options: BeamOptions,
    stop: StopRule,
    num_tokens: int,
) -> list[int]:
    """Moves a sentence on by one token; gives the parents of what grows on."""
    last = num_tokens == stop.max_tokens
    growing: list[tuple[float, tuple[int, ...]]] = []
    parents = []
    for rank, (score, (parent, token)) in enumerate(zip(scores, choices, strict=True)):
        ids = search.growing[parent][1]
        ended = token == stop.end_id
        if ended or last:
            if rank < options.num_beams:
                kept = ids if ended else (*ids, token)
                search.keep(Beam(kept, options.score(score, num_tokens), ended), options.num_beams)
        elif len(growing) < options.num_beams:
            growing.append((score, (*ids, token)))
            parents.append(parent)
    if not last:
        search.growing = growing
    return parents
