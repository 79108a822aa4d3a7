"""Micro-batches: rows packed into one sequence of a fixed number of tokens.

Takes `PackedRow`s (None for a row that is masked) -> gives a `Batch`.

Invariants: T = m*S whatever the rows hold; the documents of all rows come first, then padding as ONE
document with ignored labels; for pairs it is there on both sides, so that both have equally many
documents; everything random in the model follows the key made from (seed, step, j). Only NumPy
computes here: torch operators in the prefetch thread would start a second pool of threads.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from pretrain.data.objective import I64, PackedRow
from pretrain.data.permutation import derive_key, mix_keys
from pretrain.sequence import IGNORED_LABEL, Batch, PrefixLayout, SeqInfo

DIGEST_MODULUS = 1 << 48  # sums of up to 2^15 ranks stay exact in int64


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The fixed shape of every micro-batch of a run.

    Attributes:
        rows: m, rows of a micro-batch.
        sequence_length: S, decoder tokens of a row.
        source_length: encoder tokens of a row; None without an encoder.
        pad_id, start_id: ids of padding and of the decoder's first input.
    """

    rows: int
    sequence_length: int
    source_length: int | None
    pad_id: int
    start_id: int


def dropout_key(seed: int, step: int, index: int) -> int:
    """The 63-bit key that everything random in micro-batch `index` of `step` follows."""
    return derive_key("dropout 1", seed, step, index) >> 1


def sum_digests(digests: Iterable[int]) -> int:
    """Order-free digest of many: of micro-batches within a rank, of ranks within a step."""
    return sum(digests) % DIGEST_MODULUS


def make_batch(
    rows: Sequence[PackedRow | None],
    shape: BatchShape,
    byte_lengths: NDArray[np.integer] | None,
    *,
    index: int,
    key: int,
) -> Batch:
    """Packs at most m rows into micro-batch `index`; missing and masked rows become padding.

    Args:
        byte_lengths: [V] bytes of text that each id spells; None where the bytes of the targets are not asked for.
        key: the dropout key.
    """
    present = [row for row in rows if row is not None]
    num_tokens = shape.rows * shape.sequence_length
    decoder_ids, lengths, padded = _pack(
        [row.decoder_ids for row in present], [row.lengths for row in present], num_tokens, shape
    )
    labels = np.full(num_tokens, IGNORED_LABEL, dtype=np.int64)
    num_real = sum(row.labels.size for row in present)
    if present:
        np.concatenate([row.labels for row in present], out=labels[:num_real])
    encoder_ids, encoder_info, encoder_lengths = None, None, None
    if shape.source_length is not None:
        ids = [row.encoder_ids for row in present if row.encoder_ids is not None]
        of_rows = [row.encoder_lengths for row in present if row.encoder_lengths is not None]
        encoder_ids, encoder_lengths, source_padded = _pack(ids, of_rows, shape.rows * shape.source_length, shape)
        encoder_info = seq_info(encoder_lengths, padding=source_padded)
    target_tokens, target_bytes = _count_targets(labels, byte_lengths)
    prefixes = _prefixes(present, padded)
    further = [] if prefixes is None else [prefixes]  # nothing where there are none: digests stay as they were
    return Batch(
        index=index,
        decoder_ids=torch.from_numpy(decoder_ids),
        decoder_info=seq_info(lengths, padding=padded, prefixes=prefixes),
        labels=torch.from_numpy(labels),
        encoder_ids=None if encoder_ids is None else torch.from_numpy(encoder_ids),
        encoder_info=encoder_info,
        dropout_key=key,
        target_tokens=target_tokens,
        target_bytes=target_bytes,
        digest=_digest(index, decoder_ids, lengths, labels, encoder_ids, encoder_lengths, *further),
        row_tokens=None if num_real == num_tokens else tuple(0 if row is None else row.labels.size for row in rows),
        document_kinds=_kinds(present),
    )


def empty_batch(shape: BatchShape) -> Batch:
    """A micro-batch that only keeps the collectives in step: one padding document, no target, digest 0."""
    num_tokens = shape.rows * shape.sequence_length
    encoder_ids, encoder_info = None, None
    if shape.source_length is not None:
        num_source = shape.rows * shape.source_length
        encoder_ids = torch.from_numpy(np.full(num_source, shape.pad_id, dtype=np.int64))
        encoder_info = seq_info(np.array([num_source]), padding=True)
    return Batch(
        index=-1,
        decoder_ids=torch.from_numpy(np.full(num_tokens, shape.pad_id, dtype=np.int64)),
        decoder_info=seq_info(np.array([num_tokens]), padding=True),
        labels=torch.from_numpy(np.full(num_tokens, IGNORED_LABEL, dtype=np.int64)),
        encoder_ids=encoder_ids,
        encoder_info=encoder_info,
        dropout_key=0,
        target_tokens=0,
        target_bytes=0,
        digest=0,
    )


def seq_info(lengths: I64, *, padding: bool = False, prefixes: I64 | None = None) -> SeqInfo:
    """`SeqInfo.from_lengths` without a torch operator.

    Args:
        prefixes: int64 [N], tokens at the beginning of each document that see each other in both directions.
    """
    edges = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=edges[1:])
    positions = np.arange(edges[-1], dtype=np.int64) - np.repeat(edges[:-1], lengths)
    return SeqInfo(
        lengths=tuple(lengths.tolist()),
        cu_seqlens=torch.from_numpy(edges.astype(np.int32)),
        positions=torch.from_numpy(positions),
        padding=padding,
        prefix=None if prefixes is None else prefix_layout(lengths, prefixes, padding=padding),
    )


def prefix_layout(lengths: I64, prefixes: I64, *, padding: bool) -> PrefixLayout:
    """The two parts of documents of these lengths, of which `prefixes` tokens are the first part."""
    is_first = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths) < np.repeat(
        prefixes, lengths
    )
    first, second, rest = np.flatnonzero(is_first), np.flatnonzero(~is_first), lengths - prefixes
    goes_on = rest > 0
    keys = None if goes_on.all() else np.flatnonzero(np.repeat(goes_on, lengths))
    has_second = bool(goes_on.any())
    return PrefixLayout(
        first=torch.from_numpy(first),
        first_info=seq_info(prefixes[prefixes > 0]) if first.size else None,
        second=torch.from_numpy(second),
        second_info=seq_info(rest[goes_on], padding=padding) if has_second else None,
        keys=None if keys is None else torch.from_numpy(keys),
        keys_info=seq_info(lengths[goes_on], padding=padding) if has_second else None,
        order=torch.from_numpy(np.argsort(np.concatenate([first, second]), kind="stable")),
    )


def _prefixes(rows: Sequence[PackedRow], padded: bool) -> I64 | None:
    """First parts of all documents, padding (which has none) included; None where no row has any."""
    found = [row.prefix_lengths for row in rows if row.prefix_lengths is not None]
    return np.concatenate([*found, np.zeros(int(padded), dtype=np.int64)]) if found else None


def _kinds(rows: Sequence[PackedRow]) -> tuple[int, ...] | None:
    kinds = [kind for row in rows if row.kinds is not None for kind in row.kinds.tolist()]
    return tuple(kinds) if kinds else None


def _pack(
    ids: Sequence[NDArray[np.integer]], lengths: Sequence[I64], num_tokens: int, shape: BatchShape
) -> tuple[I64, I64, bool]:
    """Ids, document lengths, and whether the last document is padding."""
    packed = np.full(num_tokens, shape.pad_id, dtype=np.int64)
    num_real = sum(part.size for part in ids)
    if ids:
        packed[:num_real] = np.concatenate(ids)
    padding = [num_tokens - num_real] if num_real < num_tokens else []
    return packed, np.concatenate([*lengths, np.array(padding, dtype=np.int64)]), bool(padding)


def _count_targets(labels: I64, byte_lengths: NDArray[np.integer] | None) -> tuple[int, int]:
    """(labels that count, bytes of text that they spell)."""
    counts = labels != IGNORED_LABEL
    num = int(np.count_nonzero(counts))
    if byte_lengths is None:
        return num, 0
    # Ignored ones are taken as id 0 and subtracted again: selecting first takes four times as long.
    spelt = int(byte_lengths.take(labels * counts).sum(dtype=np.int64))
    return num, spelt - (labels.size - num) * int(byte_lengths[0])


def digest_of(index: int, *words: int) -> int:
    """62 bits of BLAKE2b over the micro-batch's number and the size and checksum of each of its arrays, one after the
    other.

    They are decoder ids, document lengths, labels, then encoder ids and lengths, (0, 0) where there is no encoder.
    """
    packed = _packer(1 + len(words))(index, *words)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 2


@lru_cache(maxsize=4)
def _packer(num_words: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{num_words}Q").pack


def checksums(rows: I64) -> list[int]:
    """Of each row of [n, size]: the sum of its values times fixed odd weights, modulo 2^64.

    A single changed value always changes it, several do but for about one case in 2^63, and it takes a
    tenth of the time of hashing the values.
    """
    # einsum: twice as fast as dot, which has no vectorised loop for uint64.
    return [int(value) for value in np.einsum("ij,j->i", rows.view(np.uint64), weights_of(rows.shape[1]))]


def _digest(index: int, *arrays: I64 | None) -> int:
    """`digest_of` of whole arrays."""
    pairs = ((0, 0) if array is None else (array.size, checksums(array[None])[0]) for array in arrays)
    return digest_of(index, *(word for pair in pairs for word in pair))


def weights_of(size: int) -> NDArray[np.uint64]:
    """The first `size` odd uint64 of a fixed sequence."""
    return _many_weights(max(1024, 1 << (size - 1).bit_length()))[:size]


@lru_cache(maxsize=8)
def _many_weights(size: int) -> NDArray[np.uint64]:
    return mix_keys(np.full(size, derive_key("digest 2"), dtype=np.uint64), np.arange(size)) | np.uint64(1)
