"""Prefix LM: what stands before a place of a document is given, what follows is predicted. PURE.

The place is uniform over those that leave something on both sides. A document that goes on behind the row
ends with its next token as a target, as in causal LM. Source: Raffel et al. 2020, section 3.2.1.
"""

from __future__ import annotations

import numpy as np

from pretrain.data.objective import I64, Ids
from pretrain.data.objective_tasks import Piece, Task, pieces
from pretrain.data.random_stream import uniforms


def prefix_lm_tasks(ids: Ids, ends: I64, num_real: int, key: int) -> list[Task]:
    """The tasks of a row; documents of one token have none. See `objective_tasks.pieces` for the arguments."""
    draws = uniforms(key, num_real)
    found = (split(piece, draws[piece.start]) for piece in pieces(ids, ends, num_real))
    return [task for task in found if task is not None]


def split(piece: Piece, draw: float) -> Task | None:
    """The task of one document; None where there is nothing to give."""
    if not piece.body.size:
        return None
    place = 1 + int(draw * piece.body.size)  # the tail is always predicted
    return Task(piece.body[:place], np.append(piece.body[place:], piece.tail))
