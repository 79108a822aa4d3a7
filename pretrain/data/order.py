"""The order of rows: where global row n comes from, as a pure function of (seed, sources, n). PURE.

Takes shapes of sources, a seed, lanes L and window blocks W -> gives the address of any row in O(1).

Row n belongs to lane n mod L. A lane takes its next source from a periodic largest-deficit schedule
of exact quotas, and that source's next row in this lane. Per source, an epoch of a lane is N*B/L rows
(N blocks of B rows): first the full groups of L*W blocks of the epoch's permutation, W blocks to a
lane, rows permuted within these W blocks; then the blocks left over, all their rows permuted together
and dealt to the lanes row by row. So every row comes exactly once per lane-epoch for every N >= 1.
Source: own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from pretrain.data.permutation import I64, derive_key, mix_keys, permute
from pretrain.errors import DataError

LONGEST_PERIOD = 4096
_ORDER_VERSION = "pretrain row order 1"


@dataclass(frozen=True, slots=True)
class SourceShape:
    """What the order needs to know of a source.

    Attributes:
        name: keys its permutations.
        num_blocks: N >= 1.
        rows_per_block: B, a multiple of the lanes.
        weight: its share of the rows, relative to the other weights.
    """

    name: str
    num_blocks: int
    rows_per_block: int
    weight: float = 1.0

    @property
    def num_rows(self) -> int:
        return self.num_blocks * self.rows_per_block


class RowAddress(NamedTuple):
    """Where a row lies: index of the source, its epoch there, block and row within the block."""

    source: int
    epoch: int
    block: int
    row: int


@dataclass(frozen=True, slots=True)
class _SourceKeys:
    blocks: np.uint64
    windows: np.uint64
    leftover: np.uint64


class RowOrder:
    """The order of one segment of a run: fixed sources and weights from `first_row` on.

    Args:
        sources: their sequence fixes ties of the schedule; give them sorted by name.
        seed: of the run.
        lanes: L, divides every source's rows_per_block.
        window_blocks: W.
        first_row: global row at which this segment begins.
        consumed: per source name, rows of it that each lane [L] took before this segment.

    Raises:
        DataError: lanes that do not divide a block's rows, or a weight too small for a quota.
    """

    def __init__(
        self,
        sources: Sequence[SourceShape],
        seed: int,
        lanes: int,
        window_blocks: int,
        first_row: int = 0,
        consumed: Mapping[str, I64] | None = None,
    ) -> None:
        self.sources = tuple(sources)
        self.seed, self.lanes, self.window_blocks, self.first_row = seed, lanes, window_blocks, first_row
        _check_shapes(self.sources, lanes)
        self.quotas = mixing_quotas(self.sources)
        self.period = sum(self.quotas)
        schedule = largest_deficit_schedule(self.quotas)
        self._schedule = np.array(schedule, dtype=np.int64)
        self._quota = np.array(self.quotas, dtype=np.int64)
        taken = np.zeros((self.period + 1, len(self.sources)), dtype=np.int64)
        np.cumsum(self._schedule[:, None] == np.arange(len(self.sources)), axis=0, out=taken[1:])
        self._ordinal = taken[np.arange(self.period), self._schedule]
        lane = np.arange(lanes, dtype=np.int64)
        self._phase = lane * self.period // lanes  # lanes start at different slots: a batch mixes at once
        self._begin = -((lane - first_row) // lanes)
        self._taken = taken[self._phase]
        self._before = np.zeros((lanes, len(self.sources)), dtype=np.int64)
        for index, source in enumerate(self.sources):
            if consumed is not None and source.name in consumed:
                self._before[:, index] = consumed[source.name]
        self._keys = tuple(_source_keys(seed, source.name) for source in self.sources)

    def locate(self, row: int) -> RowAddress:
        """Address of one global row. Raises ValueError for a row before this segment."""
        return self.locate_range(row, 1)[0]

    def locate_range(self, first: int, count: int) -> list[RowAddress]:
        """Addresses of `count` consecutive global rows. Raises ValueError for rows before this segment."""
        return self.locate_rows(np.arange(first, first + count, dtype=np.int64))

    def locate_rows(self, rows: I64) -> list[RowAddress]:
        """Addresses of many global rows [n] at once. Raises ValueError for rows before this segment."""
        return [RowAddress(*address) for address in self.place_rows(rows).tolist()]

    def place_rows(self, rows: I64) -> I64:
        """Addresses [n, 4] of global rows [n] as (source, epoch, block, row). Raises as `locate_rows`."""
        if rows.size and int(rows.min()) < self.first_row:
            raise ValueError(f"row {int(rows.min())} lies before the segment, which begins at row {self.first_row}")
        lane = rows % self.lanes
        slot = rows // self.lanes - self._begin[lane] + self._phase[lane]
        source = self._schedule[slot % self.period]
        index = (
            slot // self.period * self._quota[source]
            + self._ordinal[slot % self.period]
            - self._taken[lane, source]
            + self._before[lane, source]
        )
        placed = np.empty((rows.size, 4), dtype=np.int64)
        placed[:, 0] = source
        for number in range(len(self.sources)):
            mine = np.flatnonzero(source == number)
            if mine.size:
                placed[mine, 1:] = self._place(number, lane[mine], index[mine])
        return placed

    def consumed(self, row: int) -> dict[str, I64]:
        """Rows of each source that each lane [L] took before the global row `row`."""
        lane = np.arange(self.lanes, dtype=np.int64)
        slot = -((lane - row) // self.lanes) - self._begin + self._phase
        taken = {}
        for number, source in enumerate(self.sources):
            slots = np.flatnonzero(self._schedule == number)
            count = slot // self.period * self.quotas[number] + np.searchsorted(slots, slot % self.period)
            taken[source.name] = count - self._taken[:, number] + self._before[:, number]
        return taken

    def _place(self, number: int, lane: I64, index: I64) -> I64:
        """Epoch, block and row [n, 3] of a source's row `index` in `lane`."""
        source, keys = self.sources[number], self._keys[number]
        rows, blocks = source.rows_per_block, source.num_blocks
        group_blocks = self.lanes * self.window_blocks
        full_groups = blocks // group_blocks
        window_rows = self.window_blocks * rows
        epoch, within = np.divmod(index, blocks * rows // self.lanes)
        group, position = np.divmod(within, window_rows)
        in_group = group < full_groups
        slot = np.empty_like(index)  # position of the block in the epoch's permutation of blocks
        row = np.empty_like(index)
        a = np.flatnonzero(in_group)
        if a.size:
            key = mix_keys(np.full(a.size, keys.windows), epoch[a], group[a], lane[a])
            block, row[a] = np.divmod(permute(position[a], window_rows, key), rows)
            slot[a] = group[a] * group_blocks + lane[a] * self.window_blocks + block
        b = np.flatnonzero(~in_group)
        if b.size:
            dealt = (within[b] - full_groups * window_rows) * self.lanes + lane[b]
            key = mix_keys(np.full(b.size, keys.leftover), epoch[b])
            block, row[b] = np.divmod(permute(dealt, (blocks - full_groups * group_blocks) * rows, key), rows)
            slot[b] = full_groups * group_blocks + block
        return np.stack([epoch, _permuted_blocks(slot, epoch, blocks, keys.blocks), row], axis=1)


def _permuted_blocks(slot: I64, epoch: I64, blocks: int, key: np.uint64) -> I64:
    """The block at each `slot` of its epoch's permutation. Rows that follow each other share theirs: then each slot
    between the lowest and the highest is permuted once."""
    if slot.size and int(epoch.min()) == int(epoch.max()):
        low, high = int(slot.min()), int(slot.max()) + 1
        if high - low < slot.size:
            between = np.arange(low, high)
            keys = mix_keys(np.full(between.size, key), np.full(between.size, epoch[0]))
            return permute(between, blocks, keys)[slot - low]
    return permute(slot, blocks, mix_keys(np.full(slot.size, key), epoch))


def mixing_quotas(sources: Sequence[SourceShape]) -> tuple[int, ...]:
    """Rows of each source in one period of the schedule: exact when the weights' common period is at most
    4096 (0.7 and 0.3 give 7 and 3), else the nearest of 4096 by largest remainders.

    Raises:
        DataError: a source whose share is less than half of 1/4096.
    """
    weights = [Fraction(str(source.weight)) for source in sources]
    shares = [weight / sum(weights) for weight in weights]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= LONGEST_PERIOD:
        return tuple(int(share * period) for share in shares)
    wanted = [share * LONGEST_PERIOD for share in shares]
    quotas = [int(want) for want in wanted]
    by_remainder = sorted(range(len(sources)), key=lambda i: (quotas[i] - wanted[i], i))
    for index in by_remainder[: LONGEST_PERIOD - sum(quotas)]:
        quotas[index] += 1
    for source, quota in zip(sources, quotas, strict=True):
        if quota == 0:
            raise DataError(
                f"data.sources.{source.name}.weight={source.weight:g} is too small. A source gets at least one "
                f"row in {LONGEST_PERIOD}. Raise its weight or remove the source."
            )
    return tuple(quotas)


def largest_deficit_schedule(quotas: Sequence[int]) -> list[int]:
    """The source of each slot of a period: always the one that lags most behind its quota, ties to the first.

    Each source appears exactly `quota` times: before a choice the deficits sum to one period, so no
    count ever exceeds its quota by one, and the counts sum to the period. Integers only.
    """
    period = sum(quotas)
    quota = np.array(quotas, dtype=np.int64)
    deficit = np.zeros_like(quota)
    schedule = []
    for _ in range(period):
        deficit += quota
        chosen = int(deficit.argmax())
        deficit[chosen] -= period
        schedule.append(chosen)
    return schedule


def _source_keys(seed: int, name: str) -> _SourceKeys:
    blocks, windows, leftover = (
        np.uint64(derive_key(_ORDER_VERSION, seed, name, purpose)) for purpose in ("blocks", "windows", "leftover")
    )
    return _SourceKeys(blocks, windows, leftover)


def _check_shapes(sources: tuple[SourceShape, ...], lanes: int) -> None:
    if not sources:
        raise DataError("data.sources={} is empty. A run reads at least one source. Name one under data.sources.")
    for source in sources:
        if source.num_blocks < 1:
            raise DataError(
                f"data.sources.{source.name} has {source.num_blocks} blocks. A source has at least one. "
                "Build it again from documents that are not empty, or remove it."
            )
        if source.rows_per_block % lanes:
            largest = math.gcd(source.rows_per_block, 1 << (lanes.bit_length() - 1))
            raise DataError(
                f"data.lanes={lanes} does not divide the {source.rows_per_block} rows of a block of "
                f"data.sources.{source.name}. Lanes share a block's rows equally. Set data.lanes={largest}."
            )
