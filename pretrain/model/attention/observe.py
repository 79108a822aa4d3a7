"""Looks at attention while a model runs: maps, entropies, and heads that have gone wrong.

Takes a model and a batch -> an `AttentionMap` per call of `attend`, recomputed densely beside the real
backend, which keeps its result. Documents are looked at one by one; memory is L x L for each, so give short
ones. What counts as collapsed is written down in `warnings_of`.
Source: entropy of attention as a sign of collapse, Zhai et al. 2023; own thresholds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pretrain.model.attention.rules import AttentionRules
from pretrain.sequence import Batch, SeqInfo

NEAR_UNIFORM = 0.99  # of the largest entropy possible
ONE_POSITION = 0.95  # of a head's weight, over all queries that see the position
FLAT_SCORES, SHARP_SCORES = 0.01, 20.0  # standard deviation of the scores that a query sees
_FEWEST_KEYS = 8  # a query that sees fewer says nothing about a head


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asked `attend` for: queries [T_q, H, K], keys [T_k, G, K], layouts and rules."""

    queries: Tensor
    keys: Tensor
    q_info: SeqInfo
    k_info: SeqInfo
    rules: AttentionRules

    @property
    def kind(self) -> str:
        if self.q_info is not self.k_info:
            return "cross"
        return "decoder" if self.rules.causal else "encoder"


@dataclass(frozen=True, slots=True)
class AttentionMap:
    """The attention of one layer in one document.

    Attributes:
        name: "decoder.0", "encoder.3", "cross.1": kind of attention and number of the layer.
        weights: what each query takes from each key; rows sum to 1, or to 0 where a query sees nothing.
        allowed: which keys a query may see.
        scores: scaled, capped and biased q k^T, before the softmax.
        scale: the factor of q k^T.
        head_width: K.
        biased: the family adds a trained bias, and may do without the usual scale.
    """

    name: str
    weights: Float[Tensor, "H Q Keys"]
    allowed: Bool[Tensor, "Q Keys"]
    scores: Float[Tensor, "H Q Keys"]
    scale: float
    head_width: int
    biased: bool


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """One head of one layer, over the queries that see at least 8 keys.

    Attributes:
        entropy: mean over queries, in nats.
        entropy_fraction: mean over queries of entropy / log(number of keys seen); 1 is uniform.
        largest_score: largest absolute score of a visible key.
        score_deviation: mean over queries of the standard deviation of the scores that the query sees.
        top_position: the key that takes most weight on average over the queries that see it.
        top_share: that average weight.
    """

    layer: str
    head: int
    entropy: float
    entropy_fraction: float
    largest_score: float
    score_deviation: float
    top_position: int
    top_share: float


_observer: ContextVar[Callable[[AttentionCall], None] | None] = ContextVar("attention_observer", default=None)


def tell_observer(call: Callable[[], AttentionCall]) -> None:
    """Hands a call to whoever observes; `attend` says so for every call, at the cost of one look-up."""
    observer = _observer.get()
    if observer is not None:
        observer(call())


@contextmanager
def observed(observer: Callable[[AttentionCall], None]) -> Iterator[None]:
    """Every call of `attend` inside the block, in this thread, goes to `observer` too."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


@torch.no_grad()
def attention_maps(model: nn.Module, batch: Batch, *, document: int = 0) -> list[AttentionMap]:
    """Maps of every layer for one document of a batch, in the order in which the model computes them."""
    maps: list[AttentionMap] = []
    numbers: Counter[str] = Counter()

    def take(call: AttentionCall) -> None:
        maps.append(map_of(call, f"{call.kind}.{numbers[call.kind]}", document))
        numbers[call.kind] += 1

    with observed(take):
        model.hidden(batch)
    return maps


def head_facts(found: AttentionMap) -> list[HeadFacts]:
    """Entropy, scores and the favourite position of each head; empty where no query sees 8 keys."""
    seen = found.allowed.sum(dim=-1)
    rows = seen >= _FEWEST_KEYS
    if not bool(rows.any()):
        return []
    allowed, weights, scores = found.allowed[rows], found.weights[:, rows], found.scores[:, rows]
    count = seen[rows].to(scores.dtype)
    entropy = torch.special.entr(weights).sum(dim=-1)
    visible = scores.masked_fill(~allowed, 0.0)
    mean = visible.sum(dim=-1) / count
    spread = ((visible - mean[..., None]) ** 2).masked_fill(~allowed, 0.0).sum(dim=-1) / count
    share = weights.sum(dim=1) / allowed.sum(dim=0).clamp(min=1)
    # A key that few queries see says nothing: the last token of a causal document takes much of its own row.
    share = share.masked_fill(allowed.sum(dim=0) < _FEWEST_KEYS, 0.0)
    top_share, top_position = share.max(dim=-1)
    return [
        HeadFacts(
            layer=found.name,
            head=head,
            entropy=float(entropy[head].mean()),
            entropy_fraction=float((entropy[head] / count.log()).mean()),
            largest_score=float(visible[head].abs().max()),
            score_deviation=float(spread[head].sqrt().mean()),
            top_position=int(top_position[head]),
            top_share=float(top_share[head]),
        )
        for head in range(weights.shape[0])
    ]


def warnings_of(found: AttentionMap, facts: list[HeadFacts]) -> list[str]:
    """What is wrong with the heads of a layer, in words."""
    usual = 1.0 / math.sqrt(found.head_width)
    scaled = f"the scale is {found.scale:.4g}, 1/sqrt(head width {found.head_width}) would be {usual:.4g}"
    words = []
    for fact in facts:
        where = f"{fact.layer} head {fact.head}"
        if fact.entropy_fraction > NEAR_UNIFORM:
            words.append(f"{where} is near uniform: its entropy is {fact.entropy_fraction:.1%} of the largest possible")
        if fact.top_share > ONE_POSITION:
            words.append(f"{where} gives {fact.top_share:.1%} of its weight to position {fact.top_position}")
        if fact.score_deviation > SHARP_SCORES:
            words.append(f"{where} is saturated: its scores deviate by {fact.score_deviation:.3g}; {scaled}")
        if fact.score_deviation < FLAT_SCORES:
            words.append(f"{where} has flat scores: they deviate by {fact.score_deviation:.2g}; {scaled}")
    if facts and not found.biased and not math.isclose(found.scale, usual, rel_tol=1e-3):
        words.append(f"{found.name}: an unusual scale: {scaled}")
    return words


def map_of(call: AttentionCall, name: str, document: int, *, most_queries: int | None = None) -> AttentionMap:
    """One document of a call, densely and in fp32: the formula of `reference`, keeping its middle.

    Args:
        most_queries: the last so many queries only.
    """
    q_HQK = _slice(call.queries, call.q_info, document)[:, -most_queries if most_queries else None :]
    k_HJK = _slice(call.keys, call.k_info, document).repeat_interleave(
        call.queries.shape[1] // call.keys.shape[1], dim=0
    )
    queries, keys = q_HQK.shape[1], k_HJK.shape[1]
    distance = torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)[None, :]
    rules, distance = call.rules, distance.to(q_HQK.device)
    allowed = rules.allowed(distance)
    scores = q_HQK @ k_HJK.transpose(1, 2) * rules.scale
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    if rules.bias is not None:
        scores = scores + rules.bias(-distance)
    weights = torch.softmax(scores.masked_fill(~allowed, -torch.inf), dim=-1).nan_to_num(0.0)
    return AttentionMap(
        name, weights.cpu(), allowed.cpu(), scores.cpu(), rules.scale, call.queries.shape[2], rules.bias is not None
    )


def _slice(x_TXK: Tensor, info: SeqInfo, document: int) -> Tensor:
    """[T, X, K] -> [X, tokens of that document, K] in fp32."""
    start = sum(info.lengths[:document])
    return x_TXK[start : start + info.lengths[document]].transpose(0, 1).float()
