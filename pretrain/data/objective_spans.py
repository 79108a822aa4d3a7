"""Span corruption and UL2's mixture: hidden parts of a document, named by sentinels. PURE.

Takes a document and a rule -> gives a `Task`: the text with a sentinel for each hidden span, then what the
spans held, each after its sentinel, then the end id. Sentinels begin anew in every document, whose own end
is never hidden. Numbers of hidden tokens and spans are T5's; every way to lay so many spans with a token
between any two is equally likely (T5's own mask always hides the end: of a short text nothing else).
UL2: each document draws one of the rules; its mode token comes first; mode S hides the end in one piece,
without a sentinel. Sources: Raffel et al. 2020, section 3.1.4 and `random_spans_noise_mask`; Tay et al. 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pretrain.config.capacity import Noise, noise_counts
from pretrain.data.objective import I64, Ids
from pretrain.data.objective_tasks import Piece, Task, pieces
from pretrain.data.random_stream import uniforms


@dataclass(frozen=True, slots=True)
class Denoiser:
    """One rule with its ids.

    Attributes:
        weight: share of the documents, relative to the other rules.
        mode_id: comes first in what is given, or None.
    """

    noise: Noise
    weight: float = 1.0
    mode_id: int | None = None


@dataclass(frozen=True, slots=True)
class Corruption:
    """What happens to the documents of a run.

    Attributes:
        shortest: documents of fewer text tokens are left out.
        sentinels: int64, ids of the spans of a document in order.
        end_id: ends every answer.
    """

    denoisers: tuple[Denoiser, ...]
    shortest: int
    sentinels: I64
    end_id: int


def span_tasks(ids: Ids, ends: I64, num_real: int, rule: Corruption, key: int) -> list[Task]:
    """The tasks of a row. See `objective_tasks.pieces` for the first arguments."""
    draws = uniforms(key, 2 * num_real).reshape(2, num_real)
    limits = np.cumsum([denoiser.weight for denoiser in rule.denoisers])
    tasks = []
    for piece in pieces(ids, ends, num_real):
        if piece.body.size < rule.shortest:
            continue
        which = int(np.searchsorted(limits, draws[0, piece.start] * limits[-1], side="right"))
        which = min(which, len(rule.denoisers) - 1)
        mine = draws[1, piece.start : piece.start + piece.body.size]
        tasks.append(corrupt(piece, rule.denoisers[which], rule, mine)._replace(kind=which))
    return tasks


def corrupt(piece: Piece, denoiser: Denoiser, rule: Corruption, draws: NDArray[np.float64]) -> Task:
    """The task of one document of at least two text tokens.

    Args:
        draws: [tokens of the body], uniform.
    """
    body, mode = piece.body, [] if denoiser.mode_id is None else [denoiser.mode_id]
    num_noise, num_spans = noise_counts(body.size, denoiser.noise)
    if denoiser.noise.mean_span is None:
        return Task(
            np.concatenate([mode, body[:-num_noise]]).astype(np.int64), np.append(body[-num_noise:], piece.tail)
        )
    hidden = divide(num_noise, num_spans, draws[: num_noise - 1])
    kept = divide(body.size - num_noise + 2, num_spans + 1, draws[num_noise - 1 :])
    kept[[0, -1]] -= 1  # before the first span and behind the last there may be nothing
    edges = np.cumsum(np.stack([kept[:-1], hidden], axis=1).ravel())  # ends of kept, hidden, kept, hidden, …
    parts = np.split(body, edges)
    sentinels = rule.sentinels[:num_spans, None]
    end = [] if piece.end_id is None else [piece.end_id]
    given = [part for kept_part, name in zip(parts[:-1:2], sentinels, strict=True) for part in (kept_part, name)]
    answer = [part for name, hidden_part in zip(sentinels, parts[1::2], strict=True) for part in (name, hidden_part)]
    return Task(
        np.concatenate([mode, *given, parts[-1], end]).astype(np.int64),
        np.append(np.concatenate(answer), rule.end_id),
    )


def divide(total: int, num_parts: int, draws: Sequence[float] | NDArray[np.float64]) -> I64:
    """`total` into `num_parts` lengths of at least 1, every division equally likely.

    Args:
        draws: at least total - 1 uniform numbers: the borders with the smallest ones are cut.
    """
    borders = np.argsort(np.asarray(draws)[: total - 1], kind="stable")[: num_parts - 1] + 1
    return np.diff(np.concatenate([[0], np.sort(borders), [total]])).astype(np.int64)
