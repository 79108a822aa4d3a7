"""Token blocks side by side in one buffer, so that the rows of a micro-batch are taken by one index.

Takes (blocks, rows) of a token source -> gives their ids, document ends and real tokens as three arrays.

Invariants: a block is read into its slot and checked by `BlockReader` before it is known here; what is given is a
copy, so that a slot can be used again; a corrupt block gives rows without tokens, or its error, never other rows.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from pretrain.data.blocks import BlockReader, CorruptBlockError, TokenBlock
from pretrain.data.objective import I64, Ids


class GatheredRows(NamedTuple):
    """Rows of S tokens: `ids` [n, S + 1] with the token behind each row, `is_end` [n, S] where a document ends,
    `num_real` [n] tokens before padding."""

    ids: Ids
    is_end: NDArray[np.bool_]
    num_real: I64

    def between(self, first: int, stop: int) -> GatheredRows:
        return GatheredRows(self.ids[first:stop], self.is_end[first:stop], self.num_real[first:stop])


class TokenArena:
    """The latest blocks of one source. For one thread at a time.

    Args:
        reader: of a source of tokens.
        num_slots: blocks that stay, least recently used out first.
    """

    def __init__(self, reader: BlockReader, num_slots: int) -> None:
        self._reader, self._num_slots = reader, num_slots
        self._stride = reader.manifest.block_tokens + 1
        self._slots: OrderedDict[int, int] = OrderedDict()
        self._free = list(range(num_slots))[::-1]
        self._ids = np.empty(num_slots * self._stride, dtype=f"<u{2 if reader.manifest.dtype == 'u2' else 4}")
        self._is_end = np.zeros(self._ids.size, dtype=np.bool_)
        self._ends = [np.zeros(0, dtype=np.int64)] * num_slots  # where `is_end` is set, by slot
        self._real_tokens = np.zeros(num_slots, dtype=np.int64)
        self._windows: tuple[int, Ids, NDArray[np.bool_]] = (0, self._ids, self._is_end)

    def __contains__(self, block: object) -> bool:
        return block in self._slots

    def gather(self, blocks: I64, rows: I64, length: int, masked: set[int], *, may_mask: bool) -> GatheredRows:
        """Rows `rows` [n] of `blocks` [n], each of `length` tokens.

        Args:
            masked: blocks whose rows come without tokens; corrupt ones are added if `may_mask`.

        Raises:
            CorruptBlockError: unless `may_mask`.
            StoreError, DataError: see `BlockReader.read`.
        """
        wanted = list(dict.fromkeys(blocks.tolist()))
        if len(wanted) <= self._num_slots:
            return self._gather(wanted, blocks, rows, length, masked, may_mask=may_mask)
        gathered = GatheredRows(
            np.zeros((blocks.size, length + 1), dtype=self._ids.dtype),
            np.zeros((blocks.size, length), dtype=np.bool_),
            np.zeros(blocks.size, dtype=np.int64),
        )
        for first in range(0, len(wanted), self._num_slots):
            some = wanted[first : first + self._num_slots]
            mine = np.flatnonzero(np.isin(blocks, some))
            part = self._gather(some, blocks[mine], rows[mine], length, masked, may_mask=may_mask)
            for whole, piece in zip(gathered, part, strict=True):
                whole[mine] = piece
        return gathered

    def _gather(
        self, wanted: list[int], blocks: I64, rows: I64, length: int, masked: set[int], *, may_mask: bool
    ) -> GatheredRows:
        for block in wanted:  # first those that are here, lest one of them makes room for another
            if block in self._slots:
                self._slots.move_to_end(block)
        for block in wanted:
            if block not in self._slots and block not in masked:
                self._load(block, masked, may_mask=may_mask)
        places = {block: self._slots.get(block, 0) for block in wanted}
        slot = np.array([places[block] for block in blocks.tolist()], dtype=np.int64)
        start = slot * self._stride + rows * length
        if self._windows[0] != length:
            windows = sliding_window_view(self._ids, length + 1)
            self._windows = (length, windows, sliding_window_view(self._is_end, length))
        _, windows, ends = self._windows
        num_real = np.minimum(np.maximum(self._real_tokens[slot] - rows * length, 0), length)
        if masked:
            num_real[[block in masked for block in blocks.tolist()]] = 0
        return GatheredRows(windows[start], ends[start], num_real)

    def _load(self, block: int, masked: set[int], *, may_mask: bool) -> None:
        slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
        start = slot * self._stride
        self._is_end[self._ends[slot]] = False
        self._ends[slot] = self._ends[slot][:0]
        try:
            content = self._reader.read(block, self._ids[start : start + self._stride])
        except Exception as error:
            self._free.append(slot)
            if not may_mask or not isinstance(error, CorruptBlockError):
                raise
            masked.add(block)
            return
        assert isinstance(content, TokenBlock)
        self._ends[slot] = content.ends + (start - 1)
        self._is_end[self._ends[slot]] = True
        self._real_tokens[slot] = content.real_tokens
        self._slots[block] = slot
