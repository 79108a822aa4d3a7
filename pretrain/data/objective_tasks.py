"""Tasks about single documents, put together to rows: given tokens and tokens to predict. PURE.

Takes what a row holds of each document -> a maker of tasks says what is given and what is predicted ->
gives a `PackedRow`: for an encoder-decoder the two sides of a pair, for a decoder one document whose first
part is given. Invariants: documents never meet; a document about which nothing is asked is left out on
both sides (nobody would read it); the last predicted token is read by nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pretrain.data.objective import I64, Ids, PackedRow
from pretrain.sequence import IGNORED_LABEL


class Piece(NamedTuple):
    """What a row holds of one document.

    Attributes:
        start: place of its first token in the row.
        body: int64, its text tokens.
        end_id: the end-of-document id, if the document ends in this row.
        behind: the document's next token, if it does not.
    """

    start: int
    body: I64
    end_id: int | None
    behind: int | None

    @property
    def tail(self) -> int:
        """The token that follows the body, wherever it stands."""
        token = self.behind if self.end_id is None else self.end_id
        assert token is not None  # one of them always is
        return token


class Task(NamedTuple):
    """One document's question and answer, int64 each and not empty; `kind` is the number of its denoiser."""

    inputs: I64
    targets: I64
    kind: int | None = None


def pieces(ids: Ids, ends: I64, num_real: int) -> Iterator[Piece]:
    """The documents of a row in order.

    Args:
        ids: [S + 1] the row and the token behind it.
        ends: ascending exclusive ends of documents within the row.
        num_real: tokens of the row before padding.
    """
    row = ids[: num_real + 1].astype(np.int64)
    start = 0
    for end in ends.tolist():
        yield Piece(start, row[start : end - 1], int(row[end - 1]), None)
        start = end
    if start < num_real:
        yield Piece(start, row[start:num_real], None, int(row[num_real]))


def pair_row(tasks: Sequence[Task], start_id: int) -> PackedRow:
    """Inputs for the encoder; the decoder reads the start id and the targets but the last."""
    return PackedRow(
        decoder_ids=_joined([part for task in tasks for part in ([start_id], task.targets[:-1])]),
        labels=_joined([task.targets for task in tasks]),
        lengths=_sizes([task.targets for task in tasks]),
        encoder_ids=_joined([task.inputs for task in tasks]),
        encoder_lengths=_sizes([task.inputs for task in tasks]),
        kinds=_kinds(tasks),
    )


def prefix_row(tasks: Sequence[Task], *, bidirectional: bool) -> PackedRow:
    """Inputs, then targets but the last, as one document each; labels stand where a target comes next.

    Args:
        bidirectional: the inputs see each other in both directions.
    """
    prefixes = _sizes([task.inputs for task in tasks])
    return PackedRow(
        decoder_ids=_joined([part for task in tasks for part in (task.inputs, task.targets[:-1])]),
        labels=_joined([part for task in tasks for part in ([IGNORED_LABEL] * (task.inputs.size - 1), task.targets)]),
        lengths=prefixes + _sizes([task.targets for task in tasks]) - 1,
        prefix_lengths=prefixes if bidirectional else None,
        kinds=_kinds(tasks),
    )


def _joined(parts: Sequence[Sequence[int] | I64]) -> I64:
    return np.concatenate([np.zeros(0, dtype=np.int64), *(np.asarray(part, dtype=np.int64) for part in parts)])


def _kinds(tasks: Sequence[Task]) -> I64 | None:
    kinds = [task.kind for task in tasks if task.kind is not None]
    return np.array(kinds, dtype=np.int64) if kinds else None


def _sizes(parts: Sequence[I64]) -> I64:
    return np.array([part.size for part in parts], dtype=np.int64)
