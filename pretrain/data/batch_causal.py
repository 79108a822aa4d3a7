"""Micro-batches of plain next-token prediction from gathered rows, without a step per row or document. PURE.

Takes `GatheredRows` of many micro-batches -> gives the `Batch`es that `batch.make_batch` gives for the same rows.
Micro-batches of full rows, which nearly all are, are made together: on short ones half of the time is what NumPy
takes to begin an operation, and that is then paid once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from pretrain.data.arena import GatheredRows
from pretrain.data.batch import BatchShape, checksums, digest_of
from pretrain.data.objective import I64
from pretrain.sequence import IGNORED_LABEL, Batch, SeqInfo


def make_causal_batches(
    rows: GatheredRows, shape: BatchShape, byte_lengths: NDArray[np.integer], names: Sequence[tuple[int, int]]
) -> list[Batch]:
    """Packs n*m gathered rows into n micro-batches: each token predicts the one behind it in its document.

    Args:
        byte_lengths: [V] bytes of text that each id spells.
        names: (index, dropout key) of each micro-batch.

    `rows.is_end` is used up: the ends of rows are marked in it.
    """
    if rows.num_real.size and int(rows.num_real.min()) == shape.sequence_length:
        return _make_full(rows, shape, byte_lengths, names)
    m = shape.rows
    return [
        _make_padded(rows.between(number * m, (number + 1) * m), shape, byte_lengths, *name)
        for number, name in enumerate(names)
    ]


def _make_full(
    rows: GatheredRows, shape: BatchShape, byte_lengths: NDArray[np.integer], names: Sequence[tuple[int, int]]
) -> list[Batch]:
    """All micro-batches at once; every row is full, so that none has padding."""
    length, num, num_tokens = shape.sequence_length, len(names), shape.rows * shape.sequence_length
    decoder_ids, labels = np.empty((num, num_tokens), dtype=np.int64), np.empty((num, num_tokens), dtype=np.int64)
    decoder_ids.reshape(-1, length)[:] = rows.ids[:, :length]
    labels.reshape(-1, length)[:] = rows.ids[:, 1:]
    is_end = rows.is_end.ravel()
    ends = np.flatnonzero(is_end)
    spelt = byte_lengths.take(labels.ravel())
    spelt[ends] = 0
    target_bytes = spelt.reshape(num, -1).sum(axis=1, dtype=np.int64).tolist()
    ends_before = np.searchsorted(ends, num_tokens * np.arange(num + 1)).tolist()
    labels.reshape(-1)[ends] = IGNORED_LABEL
    edges = _edges(is_end, rows.num_real, num * num_tokens)
    lengths = edges[1:] - edges[:-1]
    positions = (_counting(num * num_tokens) - np.repeat(edges[:-1], lengths)).reshape(num, -1)
    borders = np.searchsorted(edges, num_tokens * np.arange(num + 1)).tolist()  # every micro-batch ends a document
    of_ids, of_labels = checksums(decoder_ids), checksums(labels)
    batches = []
    for n, (index, key) in enumerate(names):
        mine = lengths[borders[n] : borders[n + 1]]
        batches.append(
            Batch(
                index=index,
                decoder_ids=torch.from_numpy(decoder_ids[n]),
                decoder_info=SeqInfo(
                    lengths=tuple(mine.tolist()),
                    cu_seqlens=torch.from_numpy(
                        (edges[borders[n] : borders[n + 1] + 1] - n * num_tokens).astype(np.int32)
                    ),
                    positions=torch.from_numpy(positions[n]),
                ),
                labels=torch.from_numpy(labels[n]),
                encoder_ids=None,
                encoder_info=None,
                dropout_key=key,
                target_tokens=num_tokens - (ends_before[n + 1] - ends_before[n]),
                target_bytes=target_bytes[n],
                digest=_digest(index, of_ids[n], mine, of_labels[n], num_tokens),
            )
        )
    return batches


def _digest(index: int, of_ids: int, lengths: I64, of_labels: int, num_tokens: int) -> int:
    of_lengths = checksums(lengths[None])[0]
    return digest_of(index, ((num_tokens, of_ids), (lengths.size, of_lengths), (num_tokens, of_labels), (0, 0), (0, 0)))


def _make_padded(
    rows: GatheredRows, shape: BatchShape, byte_lengths: NDArray[np.integer], index: int, key: int
) -> Batch:
    """One micro-batch with padding behind the tokens that its rows have."""
    length, num_tokens = shape.sequence_length, shape.rows * shape.sequence_length
    num_real = int(rows.num_real.sum())
    decoder_ids, labels = np.empty(num_tokens, dtype=np.int64), np.empty(num_tokens, dtype=np.int64)
    real = np.arange(length) < rows.num_real[:, None]
    decoder_ids[:num_real], decoder_ids[num_real:] = rows.ids[:, :length][real], shape.pad_id
    labels[:num_real], labels[num_real:] = rows.ids[:, 1:][real], IGNORED_LABEL
    is_end = rows.is_end[real]
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
        digest=_digest(index, checksums(decoder_ids[None])[0], lengths, checksums(labels[None])[0], num_tokens),
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
