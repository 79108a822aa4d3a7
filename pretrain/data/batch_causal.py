"""Micro-batches of plain next-token prediction from gathered rows, without a step per row or document. PURE.

Takes `GatheredRows` of one micro-batch -> gives the `Batch` that `batch.make_batch` gives for the same rows.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from pretrain.data.arena import GatheredRows
from pretrain.data.batch import BatchShape, _digest
from pretrain.data.objective import I64
from pretrain.sequence import IGNORED_LABEL, Batch, SeqInfo


def make_causal_batch(
    rows: GatheredRows, shape: BatchShape, byte_lengths: NDArray[np.integer], *, index: int, key: int
) -> Batch:
    """Packs m gathered rows into micro-batch `index`: each token predicts the one behind it in its document.

    Args:
        byte_lengths: [V] bytes of text that each id spells.
        key: the dropout key.

    `rows.is_end` is used up: the ends of rows are marked in it.
    """
    length, num_tokens = shape.sequence_length, shape.rows * shape.sequence_length
    num_real = int(rows.num_real.sum())
    decoder_ids, labels = np.empty(num_tokens, dtype=np.int64), np.empty(num_tokens, dtype=np.int64)
    if num_real == num_tokens:
        decoder_ids.reshape(-1, length)[:] = rows.ids[:, :length]
        labels.reshape(-1, length)[:] = rows.ids[:, 1:]
        is_end = rows.is_end
    else:
        real = np.arange(length) < rows.num_real[:, None]
        decoder_ids[:num_real], decoder_ids[num_real:] = rows.ids[:, :length][real], shape.pad_id
        labels[:num_real], labels[num_real:] = rows.ids[:, 1:][real], IGNORED_LABEL
        is_end = rows.is_end[real]
    is_end = is_end.ravel()
    ends = np.flatnonzero(is_end)
    spelt = byte_lengths.take(labels[:num_real])
    target_bytes = int(spelt.sum(dtype=np.int64)) - int(spelt[ends].sum(dtype=np.int64))
    labels[ends] = IGNORED_LABEL
    edges = _edges(is_end, rows.num_real, num_tokens)
    lengths = edges[1:] - edges[:-1]
    return Batch(
        index=index,
        decoder_ids=torch.from_numpy(decoder_ids),
        decoder_info=SeqInfo(
            lengths=tuple(lengths.tolist()),
            cu_seqlens=torch.from_numpy(edges.astype(np.int32)),
            positions=torch.from_numpy(_counting(num_tokens) - np.repeat(edges[:-1], lengths)),
            padding=num_real < num_tokens,
        ),
        labels=torch.from_numpy(labels),
        encoder_ids=None,
        encoder_info=None,
        dropout_key=key,
        target_tokens=num_real - ends.size,
        target_bytes=target_bytes,
        digest=_digest(index, decoder_ids, lengths, labels, None, None),
    )


def _edges(is_end: NDArray[np.bool_], num_real: I64, num_tokens: int) -> I64:
    """Where documents begin and end [N + 1]: at their ends, at the rows' ends, behind padding. Marks `is_end`."""
    cuts = np.cumsum(num_real)
    is_end[cuts[num_real > 0] - 1] = True
    inner = np.flatnonzero(is_end)
    padding = int(cuts[-1] < num_tokens)
    edges = np.empty(inner.size + 1 + padding, dtype=np.int64)
    edges[0] = 0
    np.add(inner, 1, out=edges[1 : inner.size + 1])
    edges[-1] = num_tokens
    return edges


@lru_cache(maxsize=4)
def _counting(size: int) -> I64:
    counting = np.arange(size, dtype=np.int64)
    counting.flags.writeable = False
    return counting
