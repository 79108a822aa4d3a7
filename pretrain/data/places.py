"""Where the rows of a step lie, for one rank: many steps located at once. PURE but for what it remembers.

Takes states -> gives addresses [n, 4] as (source index, epoch, block, row).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pretrain.data.objective import I64
from pretrain.data.segments import order_of
from pretrain.data.state import DataState, Segment
from pretrain.errors import DataError
from pretrain.topology import World

_ROWS_LOCATED = 4096  # at once: they cost three to four times as much as one
_STEPS_AHEAD = 8  # beyond those that are read ahead: lanes change their windows together


class RowPlaces:
    """For one thread at a time.

    Args:
        source_index: of each opened source, by name.
    """

    def __init__(self, world: World, source_index: Mapping[str, int]) -> None:
        self._world, self._source_index = world, source_index
        self._located: dict[int, I64] = {}
        self._segments: tuple[Segment, ...] = ()

    def of(self, state: DataState) -> I64:
        """Addresses of this rank's rows of the step that begins at `state`."""
        return self.of_steps([state])

    def of_steps(self, states: Sequence[DataState]) -> I64:
        """Those of several steps of one segment, one after the other."""
        started = states[0].started
        if started != self._segments:
            self._located, self._segments = {}, started
        places = []
        for state in states:
            if state.next_row not in self._located:
                self._locate(state)
            places.append(self._located[state.next_row])
        return places[0] if len(places) == 1 else np.concatenate(places)

    def _locate(self, state: DataState) -> None:
        """Locates the rows of a step, and of many that follow; forgets those of long ago."""
        segment, world = state.segment, self._world
        rows, size, parts = segment.micro_batch_size, segment.rows_per_step, segment.parts
        mine = np.arange(world.rank, segment.global_batch_size // rows, world.size, dtype=np.int64)
        offsets = (mine[:, None] * rows + np.arange(rows)).ravel()
        count = offsets.size
        firsts = state.next_row + size * np.arange(max(1, _ROWS_LOCATED // max(count, 1)))
        found = order_of(self._segments, state.seed).place_rows((firsts[:, None] + offsets // parts).ravel())
        if parts > 1:
            found[:, 3] = found[:, 3] * parts + np.tile(offsets % parts, firsts.size)
        opened = np.array([self._source_index[source.name] for source in segment.sources])
        found[:, 0] = opened[found[:, 0]]  # a segment need not read all sources
        oldest = state.next_row - size * _STEPS_AHEAD
        self._located = {first: places for first, places in self._located.items() if first >= oldest}
        self._located |= {first: found[i * count : (i + 1) * count] for i, first in enumerate(firsts.tolist())}

    def after(self, state: DataState) -> list[I64]:
        """Those of the steps behind it, a few, as far as they belong to its segment."""
        located, then = [], state
        for _ in range(_STEPS_AHEAD):
            try:
                then = then.advance(then.segment.rows_per_step)
            except DataError:  # belongs to the read of that step
                break
            if then.started != state.started:
                break
            located.append(self.of(then))
        return located
