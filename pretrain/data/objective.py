"""Objectives: what a row of a block teaches. PURE.

Takes slices of ids and document ends -> gives a `PackedRow`: the documents' inputs and labels, without padding.

Invariants: documents are isolated from each other, so the last token of one predicts nothing; a row's
edges cut documents too, but the token before the edge still predicts the one behind it, so that every
token of a document but its first is a target exactly once an epoch; padding never appears here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pretrain.sequence import IGNORED_LABEL

Ids: TypeAlias = NDArray[np.integer]
I64: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Real tokens of one row, document after document.

    Attributes:
        decoder_ids: [n] what the decoder reads.
        labels: int64 [n], `IGNORED_LABEL` where there is no target.
        lengths: int64 [N], decoder tokens of each document; they sum to n.
        encoder_ids: [n_source], or None.
        encoder_lengths: int64 [N], or None; as many documents as `lengths`.
        prefix_lengths: int64 [N], decoder tokens of each document that see each other in both directions; None
            where all see only what is before them.
        kinds: int64 [N], number of the denoiser of each document; None where nobody chose one.
    """

    decoder_ids: Ids
    labels: I64
    lengths: I64
    encoder_ids: Ids | None = None
    encoder_lengths: I64 | None = None
    prefix_lengths: I64 | None = None
    kinds: I64 | None = None


def causal_lm_row(ids: Ids, ends: I64, num_real: int) -> PackedRow:
    """Predict the next token.

    Args:
        ids: [S + 1] the row and the token behind it.
        ends: ascending exclusive ends of documents within the row, in 1..num_real.
        num_real: tokens of the row before padding, 0..S; padding begins behind a document's end.
    """
    labels = ids[1 : num_real + 1].astype(np.int64)
    labels[ends - 1] = IGNORED_LABEL
    return PackedRow(decoder_ids=ids[:num_real], labels=labels, lengths=document_lengths(ends, num_real))


def document_lengths(ends: I64, num_real: int) -> I64:
    """Tokens of each document of a row, the one that the row's edge cuts included."""
    if num_real == 0 or (ends.size and ends[-1] == num_real):
        return _lengths(ends)
    lengths = np.empty(ends.size + 1, dtype=np.int64)  # np.append takes four times as long
    lengths[:-1], lengths[-1] = ends, num_real
    lengths[1:] -= ends
    return lengths


def seq2seq_row(source_ids: Ids, source_ends: I64, target_ids: Ids, target_ends: I64, start_id: int) -> PackedRow:
    """Predict the target from the source, teacher-forced: the decoder reads the start id, then the target
    but its last token.

    Args:
        source_ids, target_ids: the row's slots; what lies behind the last end is padding.
        source_ends, target_ends: ascending exclusive ends within the row, one per pair.
        start_id: first decoder input of every document.
    """
    num_source = int(source_ends[-1]) if source_ends.size else 0
    num_target = int(target_ends[-1]) if target_ends.size else 0
    decoder_ids = np.empty(num_target, dtype=target_ids.dtype)
    decoder_ids[1:] = target_ids[: max(num_target - 1, 0)]
    if num_target:
        decoder_ids[np.append(0, target_ends[:-1])] = start_id
    return PackedRow(
        decoder_ids=decoder_ids,
        labels=target_ids[:num_target].astype(np.int64),
        lengths=_lengths(target_ends),
        encoder_ids=source_ids[:num_source],
        encoder_lengths=_lengths(source_ends),
    )


def _lengths(ends: I64) -> I64:
    """Distances between ends, from 0 on; np.diff with `prepend` takes five times as long on a short row."""
    lengths = ends.copy()
    lengths[1:] -= ends[:-1]
    return lengths
