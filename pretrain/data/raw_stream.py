"""One lane of a raw source: rows of tokens from the tars that it is dealt, tokenised as they are read.

Takes tar files, lane, seed and a position -> gives rows and the position behind each.

Invariants: a shard belongs to one lane for the whole run, and every document of a lane comes once in its epoch, in an
order of shards that is new in each (a shard's documents in the order of the tar); documents follow each other, each
with its end token, and are cut at rows; what a row holds depends on the position alone, so that a lane that was opened
anew goes on with the same tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from pretrain.data.documents import ReadCounts, SourceSpec
from pretrain.data.inputs import InputFile
from pretrain.data.permutation import I64, derive_key, permute
from pretrain.data.sources import read_file
from pretrain.data.state import RawPosition
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import DataError

_TOGETHER = 32  # documents that are tokenised at once
_TOGETHER_BYTES = 2**18


@dataclass(frozen=True, slots=True)
class RawRow:
    """`ids` [S + 1] with the token behind the row, ascending document `ends` in 1..S."""

    ids: I64
    ends: I64


def deal_shards(files: Sequence[InputFile], seed: int, name: str, lanes: int) -> list[list[InputFile]]:
    """The shards of each lane: shuffled, then dealt one by one.

    Raises:
        DataError: a lane would have none.
    """
    if len(files) < lanes:
        raise DataError(
            f"data.sources.{name} has {len(files)} tar files for data.lanes={lanes}. With data.reading=raw each lane "
            f"reads shards of its own. Set data.lanes={1 << (len(files).bit_length() - 1)} or less, or split shards."
        )
    order = _shuffled(len(files), derive_key("raw shards 1", seed, name))
    return [[files[number] for number in order[lane::lanes]] for lane in range(lanes)]


class RawLane:
    """See the module. For one thread at a time.

    Args:
        shards: of this lane, as `deal_shards` gives them.
        key: of the order of its shards in each epoch.
        row_tokens: S.
    """

    def __init__(self, shards: Sequence[InputFile], key: int, spec: SourceSpec, tokenizer: Tokenizer, row_tokens: int):
        self._shards, self._key, self._spec, self._tokenizer = shards, key, spec, tokenizer
        self._row_tokens = row_tokens
        self._at: RawPosition | None = None
        self._documents: Iterator[tuple[RawPosition, I64]] = iter(())
        self._begun: deque[tuple[RawPosition, I64]] = deque()  # position of the first token, ids with their end

    def read(self, position: RawPosition) -> tuple[RawRow, RawPosition]:
        """The row that begins at a position, and where the next one does.

        Raises:
            DataError: a tar is damaged, changed, or holds no text.
            StoreError: a server failed.
        """
        if position != self._at:
            self._open(position)
        length = self._row_tokens
        have = sum(len(ids) for _, ids in self._begun)
        while have <= length:
            self._begun.append(next(self._documents))
            have += len(self._begun[-1][1])
        ids = np.empty(length + 1, dtype=np.int64)
        filled, ends = 0, []
        for _, document in self._begun:
            piece = document[: length + 1 - filled]
            ids[filled : filled + len(piece)] = piece
            filled += len(piece)
            if len(piece) == len(document) and filled <= length:
                ends.append(filled)
        self._drop(length)
        self._at = self._begun[0][0]
        return RawRow(ids, np.array(ends, dtype=np.int64)), self._at

    def close(self) -> None:
        """Closes the tar that is being read."""
        self._open(RawPosition())
        self._at = None

    def _drop(self, count: int) -> None:
        """Moves the first token on by so many, all of which are there and one more."""
        while count:
            position, ids = self._begun.popleft()
            if len(ids) > count:
                moved = RawPosition(position.epoch, position.shard, position.document, position.token + count)
                self._begun.appendleft((moved, ids[count:]))
                return
            count -= len(ids)

    def _open(self, position: RawPosition) -> None:
        closing = getattr(self._documents, "close", None)
        if closing is not None:
            closing()
        self._begun.clear()
        self._documents = self._read_from(position)
        self._at = position

    def _read_from(self, position: RawPosition) -> Iterator[tuple[RawPosition, I64]]:
        """Documents from a position on, for ever; the first one without the tokens that are read."""
        epoch, first_shard, skip, token = position.epoch, position.shard, position.document, position.token
        while True:
            found = False
            order = _shuffled(len(self._shards), derive_key("raw epoch 1", self._key, epoch))
            for shard in range(first_shard, len(order)):
                for document, ids in self._tokenised(self._shards[order[shard]], skip):
                    found = True
                    yield RawPosition(epoch, shard, document, token), ids[token:]
                    token = 0
                skip = 0
            if not found and first_shard == 0:
                raise DataError(
                    f"{self._shards[0].origin} and {len(self._shards) - 1} more shards of a lane hold no text. A lane "
                    "reads text from its shards again and again. Remove empty shards or set a smaller data.lanes."
                )
            epoch, first_shard = epoch + 1, 0

    def _tokenised(self, file: InputFile, skip: int) -> Iterator[tuple[int, I64]]:
        """(number, ids with their end) of the documents of a shard behind the first `skip`."""
        file.check_unchanged()
        texts: list[str] = []
        size, number = 0, skip
        for document in islice(read_file(file, self._spec, ReadCounts()), skip, None):
            texts.append(document.text)
            size += len(document.text)
            if len(texts) == _TOGETHER or size >= _TOGETHER_BYTES:
                for ids in self._encoded(texts):
                    yield number, ids
                    number += 1
                texts, size = [], 0
        for ids in self._encoded(texts):
            yield number, ids
            number += 1

    def _encoded(self, texts: list[str]) -> list[I64]:
        if not texts:
            return []
        ids, lengths = self._tokenizer.encode_ended(texts)
        return np.split(ids.astype(np.int64), np.cumsum(lengths)[:-1])


def _shuffled(size: int, key: int) -> list[int]:
    positions = np.arange(size, dtype=np.int64)
    return permute(positions, size, np.full(size, key, dtype=np.uint64)).tolist()
