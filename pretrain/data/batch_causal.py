"""Micro-batches of plain next-token prediction from gathered rows, without a step per row or document. PURE.

Takes `GatheredRows` of many micro-batches -> gives the `Batch`es that `batch.make_batch` gives for the same rows.
Micro-batches of full rows, which nearly all are, are made together: on short ones half of the time is what NumPy
takes to begin an operation, and that is then paid once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise, repeat

import numpy as np
import torch
from numpy.typing import NDArray

from pretrain.data.arena import GatheredRows
from pretrain.data.batch import BatchShape, checksums, digest_of, weights_of
from pretrain.data.buffers import BufferPool
from pretrain.data.objective import I64, Ids
from pretrain.sequence import IGNORED_LABEL, Batch, SeqInfo

_TOKENS_PER_SLICE = 1024  # of a document, from which copying its positions is quicker
_TOKENS_AT_ONCE = 2**17  # 3 MB of ids, labels and positions; 2^14 (a core's own cache) took a sixth longer
_Filled = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]
"""Ids, labels and positions [T] of one micro-batch, the bytes its labels spell, checksums of ids and labels."""


class CausalBatches:
    """Makes the micro-batches of a run. For one thread at a time.

    Args:
        shape: of each.
        byte_lengths: [V] bytes of text that each id spells; None where the bytes of the targets are not asked for,
            which is a tenth of the time.
    """

    def __init__(self, shape: BatchShape, byte_lengths: NDArray[np.integer] | None) -> None:
        self._shape, self._byte_lengths = shape, byte_lengths
        self._num_tokens = shape.rows * shape.sequence_length
        self._spelt = None if byte_lengths is None else _SpeltBytes(byte_lengths, self._num_tokens)
        self._pool = BufferPool()

    def make(self, rows: GatheredRows, names: Sequence[tuple[int, int]]) -> list[Batch]:
        """Packs n*m gathered rows into n micro-batches: each token predicts the one behind it in its document.

        Args:
            names: (index, dropout key) of each micro-batch.

        `rows.is_end` is used up: the ends of rows may be marked in it.
        """
        if rows.num_real.size and int(rows.num_real.min()) == self._shape.sequence_length:
            return self._make_full(rows, names)
        m = self._shape.rows
        return [
            _make_padded(rows.between(number * m, (number + 1) * m), self._shape, self._byte_lengths, *name)
            for number, name in enumerate(names)
        ]

    def _make_full(self, rows: GatheredRows, names: Sequence[tuple[int, int]]) -> list[Batch]:
        """Micro-batches without padding: their layouts all at once, their tokens a few megabytes at a time."""
        num, num_tokens, m = len(names), self._num_tokens, self._shape.rows
        is_end, borders = rows.is_end.ravel(), self._num_tokens * np.arange(num + 1)
        ends = np.flatnonzero(is_end)
        edges = _edges_of_full_rows(ends, self._shape.sequence_length, num * num_tokens)
        lengths = edges[1:] - edges[:-1]
        firsts = np.searchsorted(edges, borders)
        if int(lengths.min()) < 1 or not np.array_equal(edges[firsts], borders):  # see `SeqInfo.of_checked`
            raise ValueError(f"document edges {edges[:8]} do not meet the ends of micro-batches")
        of_lengths = _checksums_of_lengths(lengths, firsts)
        all_lengths, starts, cuts = lengths.tolist(), firsts.tolist(), np.searchsorted(ends, borders).tolist()
        cu_seqlens = torch.from_numpy(_local_edges(edges, firsts, num_tokens)).split(
            [stop - start + 1 for start, stop in pairwise(starts)]
        )
        batches: list[Batch] = []
        at_once = max(1, _TOKENS_AT_ONCE // num_tokens)
        for low in range(0, num, at_once):
            high = min(low + at_once, num)
            inside = slice(starts[low], starts[high])
            filled = self._fill(
                rows.ids[low * m : high * m],
                ends[cuts[low] : cuts[high]] - low * num_tokens,
                edges[inside] - low * num_tokens,
                lengths[inside],
            )
            for n, (ids, labels, positions, target_bytes, of_ids, of_labels) in enumerate(filled, start=low):
                (index, key), first, last = names[n], starts[n], starts[n + 1]
                digest = _digest(index, num_tokens, of_ids, last - first, of_lengths[n], of_labels)
                info = SeqInfo.of_checked(tuple(all_lengths[first:last]), cu_seqlens[n], positions)
                targets = num_tokens - cuts[n + 1] + cuts[n]
                batches.append(Batch(index, ids, info, labels, None, None, key, targets, target_bytes, digest))
        return batches

    def _fill(self, rows: Ids, ends: I64, begins: I64, lengths: I64) -> Iterator[_Filled]:
        """The tokens of some micro-batches.

        Args:
            rows: [n*m, S + 1] ids with the one behind each row.
            ends: of documents that end in them, the last token of each.
            begins, lengths: of the documents, cut at the ends of rows.
        """
        length, num = self._shape.sequence_length, rows.shape[0] // self._shape.rows
        memory = self._pool.take(3 * num * self._num_tokens).reshape(3, num, self._num_tokens)
        ids, labels, positions = memory
        ids.reshape(-1, length)[:] = rows[:, :length]
        labels.reshape(-1, length)[:] = rows[:, 1:]
        target_bytes = repeat(0, num) if self._spelt is None else self._spelt.of(labels, ends)
        labels.reshape(-1)[ends] = IGNORED_LABEL
        _write_positions(positions.reshape(-1), begins, lengths, length)
        tensors = [one.unbind(0) for one in torch.from_numpy(memory).unbind(0)]
        return zip(*tensors, target_bytes, checksums(ids), checksums(labels), strict=True)


class _SpeltBytes:
    """Counts the bytes of text that labels spell, in arrays that are used again."""

    def __init__(self, byte_lengths: NDArray[np.integer], num_tokens: int) -> None:
        longest = int(byte_lengths.max(initial=0))
        self._table = byte_lengths.astype(np.uint8 if longest < 256 else np.int32)
        self._spelt = np.empty(0, dtype=self._table.dtype)
        self._dtype = np.int32 if num_tokens * longest < 2**31 else np.int64  # a third of the time where it is enough

    def of(self, labels: I64, ends: I64) -> list[int]:
        """Bytes that the labels of each micro-batch [n, T] spell, those at `ends` left out."""
        if self._spelt.size != labels.size:
            self._spelt = np.empty(labels.size, dtype=self._table.dtype)
        # Ids are checked when a block is read; "raise" would check them again.
        self._table.take(labels.reshape(-1), out=self._spelt, mode="clip")
        self._spelt[ends] = 0
        return [int(value) for value in self._spelt.reshape(labels.shape).sum(axis=1, dtype=self._dtype)]


def _write_positions(out: I64, begins: I64, lengths: I64, row: int) -> None:
    """Place of each token in its document, of documents that rows of `row` tokens cut."""
    inner = np.flatnonzero(begins % row)
    if inner.size * _TOKENS_PER_SLICE > out.size:
        np.subtract(_counting(out.size), np.repeat(begins, lengths), out=out)
        return
    counting = _counting(row)
    out.reshape(-1, row)[:] = counting  # few begin within a row: copying is quicker than computing
    for begin, length in zip(begins[inner].tolist(), lengths[inner].tolist(), strict=True):
        out[begin : begin + length] = counting[:length]


def _local_edges(edges: I64, firsts: I64, num_tokens: int) -> NDArray[np.int32]:
    """Edges of each micro-batch from its own 0 on, one micro-batch after the other: borders come twice."""
    num = firsts.size - 1
    counts = firsts[1:] - firsts[:-1] + 1
    taken = np.arange(counts.sum()) - np.repeat(np.arange(num), counts)
    return (edges[taken] - np.repeat(num_tokens * np.arange(num), counts)).astype(np.int32)


def _checksums_of_lengths(lengths: I64, firsts: I64) -> list[int]:
    """`checksums` of the lengths of each micro-batch, which begin at `firsts` [n + 1]."""
    within = np.arange(lengths.size) - np.repeat(firsts[:-1], firsts[1:] - firsts[:-1])
    weighted = lengths.view(np.uint64) * weights_of(int(within.max()) + 1)[within]
    return [int(value) for value in np.add.reduceat(weighted, firsts[:-1])]


def _digest(index: int, num_tokens: int, of_ids: int, num_lengths: int, of_lengths: int, of_labels: int) -> int:
    return digest_of(index, num_tokens, of_ids, num_lengths, of_lengths, num_tokens, of_labels, 0, 0, 0, 0)


def _make_padded(
    rows: GatheredRows, shape: BatchShape, byte_lengths: NDArray[np.integer] | None, index: int, key: int
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
    target_bytes = 0
    if byte_lengths is not None:
        spelt = byte_lengths.take(labels[:num_real])
        target_bytes = int(spelt.sum(dtype=np.int64)) - int(spelt[ends].sum(dtype=np.int64))
    labels[ends] = IGNORED_LABEL
    edges = _edges(is_end, rows.num_real, num_tokens)
    lengths = edges[1:] - edges[:-1]
    positions = _counting(num_tokens) - np.repeat(edges[:-1], lengths)
    of_ids, of_lengths, of_labels = (checksums(array[None])[0] for array in (decoder_ids, lengths, labels))
    return Batch(
        index=index,
        decoder_ids=torch.from_numpy(decoder_ids),
        decoder_info=SeqInfo(
            lengths=tuple(lengths.tolist()),
            cu_seqlens=torch.from_numpy(edges.astype(np.int32)),
            positions=torch.from_numpy(positions),
            padding=num_real < num_tokens,
        ),
        labels=torch.from_numpy(labels),
        encoder_ids=None,
        encoder_info=None,
        dropout_key=key,
        target_tokens=num_real - ends.size,
        target_bytes=target_bytes,
        digest=_digest(index, num_tokens, of_ids, lengths.size, of_lengths, of_labels),
        row_tokens=None if num_real == num_tokens else tuple(rows.num_real.tolist()),
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


def _edges_of_full_rows(ends: I64, length: int, num_tokens: int) -> I64:
    """`_edges` where no row has padding, from the last token of each document, without a look at every token."""
    edges = np.concatenate([np.arange(0, num_tokens + 1, length), ends + 1])
    edges.sort(kind="stable")  # which merges two sorted parts
    return edges[np.append(True, edges[1:] != edges[:-1])]


def _counting(size: int) -> I64:
    """0, 1, … size - 1; not to be written to."""
    return _many_counting(1 << max(size - 1, 0).bit_length())[:size]


@lru_cache(maxsize=8)
def _many_counting(size: int) -> I64:
    counting = np.arange(size, dtype=np.int64)
    counting.flags.writeable = False
    return counting
