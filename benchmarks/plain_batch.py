"""The micro-batch that every reader of the loader benchmark hands over: the same outputs as ours.

Needs only NumPy and torch, so that it also runs in the environment of the peers. Ours counts targets, bytes and a
digest on top; the others do not have to.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

ROWS, LENGTH = 8, 1024
TOKENS = ROWS * LENGTH
IGNORED = -100
_COUNTING = np.arange(TOKENS)


class PlainBatch(NamedTuple):
    """Ids and labels [T], document edges [N + 1], positions within the documents [T], lengths on the host."""

    ids: torch.Tensor
    labels: torch.Tensor
    cu_seqlens: torch.Tensor
    positions: torch.Tensor
    lengths: tuple[int, ...]


def plain_batch(ids: np.ndarray, following: np.ndarray, ends: np.ndarray) -> PlainBatch:
    """Rows as one packed sequence.

    Args:
        ids: [T] tokens of the rows.
        following: [T] the token behind each.
        ends: ascending exclusive ends of documents within 1..T.
    """
    labels = following.astype(np.int64)
    labels[ends - 1] = IGNORED
    is_end = np.zeros(TOKENS, dtype=bool)
    is_end[ends - 1] = True
    is_end[LENGTH - 1 :: LENGTH] = True
    inner = np.flatnonzero(is_end)
    edges = np.zeros(inner.size + 1, dtype=np.int64)
    np.add(inner, 1, out=edges[1:])
    lengths = edges[1:] - edges[:-1]
    return PlainBatch(
        torch.from_numpy(ids.astype(np.int64)),
        torch.from_numpy(labels),
        torch.from_numpy(edges.astype(np.int32)),
        torch.from_numpy(_COUNTING - np.repeat(edges[:-1], lengths)),
        tuple(lengths.tolist()),
    )


class Chunker:
    """Concatenates documents and cuts micro-batches off."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._lengths: list[int] = []
        self._have = 0

    def add(self, document: np.ndarray) -> PlainBatch | None:
        """A micro-batch once there are T tokens and the one behind them."""
        self._parts.append(document)
        self._lengths.append(document.size)
        self._have += document.size
        return self.more()

    def more(self) -> PlainBatch | None:
        """Another micro-batch, if a long document gave more than one."""
        if self._have <= TOKENS:
            return None
        flat = np.concatenate(self._parts)
        ends = np.cumsum(self._lengths)
        inside = int(np.searchsorted(ends, TOKENS, side="right"))
        batch = plain_batch(flat[:TOKENS], flat[1 : TOKENS + 1], ends[:inside])
        rest = flat[TOKENS:]
        self._parts = [rest]
        self._lengths = np.diff(ends[inside:], prepend=TOKENS).tolist()
        self._have = rest.size
        return batch


def packed_rows(rows: np.ndarray, end_id: int) -> PlainBatch:
    """Rows [m, S + 1] that were packed beforehand; documents end where `end_id` is."""
    ids = rows[:, :LENGTH].ravel()
    return plain_batch(ids, rows[:, 1:].ravel(), np.flatnonzero(ids == end_id) + 1)
