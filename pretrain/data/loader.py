"""The loader: the micro-batches of any step, for this rank, from the position in a `DataState`.

Takes a config, the tokenizer's byte lengths and this rank's place -> gives `StepData` by (step, state).

Invariants: micro-batch j of a step is rows [j*m, (j+1)*m) of its global batch, whoever computes it;
rank d of R takes j = d (mod R), filled up with empty ones to ceil(J/R), so that every rank does
equally many; `read` is a pure function of (step, state) and the data: no position is kept here, and
the thread that reads ahead changes nothing. A corrupt block never shifts the order.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pretrain.config.batches import batches_of
from pretrain.config.schema import RunConfig
from pretrain.data.arena import GatheredRows, TokenArena
from pretrain.data.batch import BatchShape, dropout_key, empty_batch, make_batch, sum_digests
from pretrain.data.batch_causal import CausalBatches
from pretrain.data.blocks import CorruptBlockError
from pretrain.data.describe import describe_pipeline
from pretrain.data.objective import I64, PackedRow
from pretrain.data.order import RowAddress
from pretrain.data.places import RowPlaces
from pretrain.data.prefetch import Prefetcher
from pretrain.data.random_stream import row_key
from pretrain.data.raw_loader import RawLoader, open_raw
from pretrain.data.rows import SourceRows, batch_shape, open_sources
from pretrain.data.segments import check_same_data, order_of
from pretrain.data.shares import shares_of, started_before
from pretrain.data.stages import plan_of, plan_run
from pretrain.data.state import DataState, Segment
from pretrain.data.step import StepData as StepData
from pretrain.errors import DataError
from pretrain.sequence import Batch
from pretrain.topology import World

_SHORT_STEPS, _SHORT_STEPS_TOKENS = 32, 2**18  # local and small: 6 MB ahead
_OBJECTIVES_WITHOUT_CHANCE = ("causal_lm", "seq2seq")  # a key per row would take a seventh of the time


def open_loader(
    config: RunConfig,
    byte_lengths: NDArray[np.integer] | None,
    world: World,
    *,
    tokenizer_sha256: str | None = None,
    special_ids: Mapping[str, int] | None = None,
) -> Loader | RawLoader:
    """Opens the training sources of a run, as data.reading says.

    Args:
        byte_lengths: [V] bytes of text that each id spells (`Tokenizer.byte_lengths`); None where nobody asks for the
            bytes of the targets, as training does not.
        tokenizer_sha256: of the run's tokenizer; read from the file config.tokenizer if not given.
        special_ids: its control ids by name; read likewise where the objective needs them.

    Raises:
        DataError: a source is missing, damaged or does not fit the run, or all hold less than a global batch.
        StoreError: the storage failed.
    """
    if config.data.reading == "raw":
        return open_raw(config, byte_lengths, world, tokenizer_sha256=tokenizer_sha256)
    sources = open_sources(config, "sources", tokenizer_sha256=tokenizer_sha256, special_ids=special_ids)
    return Loader(config, tuple(sources.values()), byte_lengths, world)


class Loader:
    """See the module; made by `open_loader`. Use `close` (or `with`) to end its thread."""

    def __init__(
        self, config: RunConfig, sources: tuple[SourceRows, ...], byte_lengths: NDArray[np.integer] | None, world: World
    ) -> None:
        self._config, self._sources, self._byte_lengths, self._world = config, sources, byte_lengths, world
        self._sections = batches_of(config.batch, config.data.stages)
        self._shapes: dict[tuple[int, int], BatchShape] = {}
        self._source_index = {source.name: index for index, source in enumerate(sources)}
        self._plan = plan_of(config, sources)
        self._initial = plan_run(self._plan, DataState(next_row=0, seed=config.seed, segments=()))
        for number in range(len(self._initial.segments)):  # what does not fit fails here, not at the first step
            order_of(self._initial.segments[: number + 1], config.seed)
        self._check_enough_rows()
        self._is_random = config.objective.kind not in _OBJECTIVES_WITHOUT_CHANCE
        self._any_remote = any(source.reader.is_remote for source in sources)
        self._arenas = [
            TokenArena(source.reader, config.data.lanes * config.data.window_blocks + 2)
            for source in sources
            if config.objective.kind == "causal_lm" and not any(one.manifest.masked for one in sources)
        ]
        self._causal: dict[BatchShape, CausalBatches] = {}
        self._places = RowPlaces(world, self._source_index)
        step_tokens = max(one.global_batch_size * one.sequence_length for one in self._sections) // world.size
        few = 1 if self._any_remote else min(_SHORT_STEPS, max(1, _SHORT_STEPS_TOKENS // max(step_tokens, 1)))
        self._prefetcher = Prefetcher(
            self._read_steps,
            self.next_state,
            depth=max(config.data.prefetch_steps, few),
            most_at_once=max(1, few // 2),
            timeout_s=config.health.data_timeout_s,
            fetching=lambda: next((s.reader.fetching for s in sources if s.reader.fetching), ""),
        )

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names by source index."""
        return tuple(source.name for source in self._sources)

    def initial_state(self) -> DataState:
        """The state of a run that has read nothing."""
        return self._initial

    def check(self, state: DataState) -> None:
        """Accepts a state that this config reads on without any change.

        Raises:
            DataError: seed, data, lanes, lengths, weights or batch size are not the state's.
        """
        if self.resume(state) != state:
            raise DataError(
                "batch.global_batch_size or a weight, length, stage, cap, skip or source is not the checkpoint's. "
                "Such a change begins a new segment of the data. Resume the run with it, or restore the old value."
            )

    def resume(self, state: DataState) -> DataState:
        """The state from which this config reads on: the same, or with other segments from here on if batch size,
        weights, stages, caps, skips or the list of sources changed (each source goes on behind its last row, so nothing
        is lost or repeated).

        Raises:
            DataError: seed, data, lanes or lengths are not the state's.
        """
        if state.seed != self._config.seed:
            raise DataError(
                f"seed={self._config.seed} is not the checkpoint's {state.seed}. The seed decides the order of rows. "
                f"Set seed={state.seed}, or start a new run."
            )
        read = {source.name: source for segment in state.started for source in segment.sources}
        plan, dealt = self._plan, state.segment.row_tokens
        if (
            dealt > plan.base.row_tokens and dealt % plan.base.row_tokens == 0
        ):  # all lengths are parts of the rows so far
            plan = plan_of(self._config, self._sources, dealt)
        check_same_data(plan.base, replace(state.segment, sources=tuple(read.values())))
        planned = plan_run(plan, state)
        return state if planned == state else planned

    def next_state(self, state: DataState) -> DataState:
        """The state after the step that begins at `state`. Raises DataError where a skip begins inside it."""
        return state.advance(state.segment.rows_per_step)

    def quarantine(self, state: DataState, blocks: Iterable[tuple[int, int]]) -> DataState:
        """The state in which these (source index, block), found by any rank, give no labels from this step on. All
        ranks then read the step again with it.

        Raises:
            DataError: more than 1 % of a source's blocks (and more than one) would be quarantined.
        """
        after = state.with_quarantine((self._sources[source].name, block) for source, block in blocks)
        for source in self._sources:
            bad = [entry.block for entry in after.quarantine if entry.source == source.name]
            if len(bad) > max(1, source.manifest.blocks // 100):
                raise DataError(
                    f"{len(bad)} of {source.manifest.blocks} blocks of data.sources.{source.name} are corrupt "
                    f"({', '.join(map(str, bad[:8]))}). data.on_corrupt=mask leaves out one block, or 1 % of a source. "
                    "Copy the source again or rebuild it, then resume."
                )
        return after

    def read(self, step: int, state: DataState, waiting: Callable[[], None] | None = None) -> StepData:
        """This rank's micro-batches of the step that begins at `state`; any step, in any order.

        Args:
            waiting: called twice a second while the rows are waited for.

        Raises:
            CorruptBlockError: a block is damaged and data.on_corrupt is raise.
            StoreError: the storage failed, or the rows did not come within health.data_timeout_s.
            DataError: an index is damaged.
        """
        return self._prefetcher.read(step, state, waiting)

    def describe(self) -> str:
        """The data pipeline as a tree: sources, quotas, epochs over the run, tokens."""
        return describe_pipeline(self._config, self._sources, self._initial)

    def fetch_record(self) -> dict[str, float]:
        """What reading took so far, all sources together, by the names of `metrics.definitions`."""
        counts = [source.reader.counts for source in self._sources]
        return {
            "data_fetch_s": sum(count.wait_s for count in counts),
            "data_retries": sum(count.retries for count in counts),
            "data_hedges": sum(count.hedges for count in counts),
            "data_cache_hits": sum(count.cache_hits for count in counts),
            "data_waits": float(self._prefetcher.waited),
        }

    def row_sources(self, state: DataState, index: int) -> I64:
        """Source index of each row of micro-batch `index` of the step that begins at `state`."""
        size = state.segment.micro_batch_size
        first = state.next_row + index * size
        placed = order_of(state.started, state.seed).place_rows(np.arange(first, first + size))
        return np.array([self._source_index[source.name] for source in state.segment.sources])[placed[:, 0]]

    def shares(self, after: DataState) -> dict[str, dict[str, float]]:
        """See `shares_of`."""
        return shares_of(after, order_of(started_before(after), after.seed))

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        self._prefetcher.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------- reading

    def _read_steps(self, steps: Sequence[tuple[int, DataState]]) -> list[StepData]:
        """What `read` gives for each; steps of plain text together, which is faster, while no block is corrupt."""
        states = [state for _, state in steps]
        if len(steps) > 1 and self._arenas and _are_alike(states):
            segment = states[0].segment
            located = self._places.of_steps(states)
            if self._any_remote:
                self._send_for([located], set())
            masked = [set[int]() for _ in self._arenas]
            may_mask = self._config.data.on_corrupt == "mask"
            gathered = self._gather(segment, located, masked, may_mask=may_mask)
            if not any(masked):
                mine = self._numbers(segment)
                made = self._make(segment, gathered, [(step, j) for step, _ in steps for j in mine])
                count = len(mine)
                return [
                    self._step_data(step, segment, made[number * count : (number + 1) * count])
                    for number, (step, _) in enumerate(steps)
                ]
        return [self._read(step, state) for step, state in steps]

    def _read(self, step: int, state: DataState) -> StepData:
        located = self._places.of(state)
        bad = {(self._source_index[q.source], q.block) for q in state.quarantine if q.from_row <= state.next_row}
        if self._any_remote:
            self._send_for([located, *self._places.after(state)], bad)
        pack = self._pack_gathered if self._arenas else self._pack_rows
        segment = state.segment
        names = [(step, j) for j in self._numbers(segment)]
        batches, masked_rows, found = pack(segment, names, located, bad)
        return self._step_data(step, segment, batches, masked_rows, tuple(sorted(found)))

    def _step_data(
        self,
        step: int,
        segment: Segment,
        batches: list[Batch],
        masked_rows: int = 0,
        corrupt: tuple[tuple[int, int], ...] = (),
    ) -> StepData:
        """One step's micro-batches, filled up with empty ones."""
        every_rank = -(-(segment.global_batch_size // segment.micro_batch_size) // self._world.size)
        if len(batches) < every_rank:
            batches = batches + [empty_batch(self._shape(segment))] * (every_rank - len(batches))
        return StepData(
            step=step,
            batches=tuple(batches),
            target_tokens=sum([batch.target_tokens for batch in batches]),
            digest=sum_digests([batch.digest for batch in batches]),
            masked_rows=masked_rows,
            corrupt=corrupt,
        )

    def _numbers(self, segment: Segment) -> range:
        """The numbers j of this rank's micro-batches of a step."""
        return range(self._world.rank, segment.global_batch_size // segment.micro_batch_size, self._world.size)

    def _shape(self, segment: Segment) -> BatchShape:
        """Of the micro-batches of a segment."""
        rows, length = segment.micro_batch_size, segment.sequence_length
        if (rows, length) not in self._shapes:
            batch = self._config.batch.model_copy(update={"micro_batch_size": rows, "sequence_length": length})
            self._shapes[rows, length] = batch_shape(self._config, self._sources[0].manifest, batch)
        return self._shapes[rows, length]

    def _make(self, segment: Segment, gathered: GatheredRows, names: list[tuple[int, int]]) -> list[Batch]:
        keyed = [(j, dropout_key(self._config.seed, step, j)) for step, j in names]
        shape = self._shape(segment)
        if shape not in self._causal:
            self._causal[shape] = CausalBatches(shape, self._byte_lengths)
        return self._causal[shape].make(gathered, keyed)

    def _pack_gathered(
        self, segment: Segment, names: list[tuple[int, int]], located: I64, bad: set[tuple[int, int]]
    ) -> tuple[list[Batch], int, set[tuple[int, int]]]:
        """Micro-batches of plain text, their masked rows, blocks that were found corrupt."""
        may_mask = self._config.data.on_corrupt == "mask"
        masked = [{block for of_source, block in bad if of_source == index} for index in range(len(self._arenas))]
        batches = self._make(segment, self._gather(segment, located, masked, may_mask=may_mask), names)
        all_masked = {(index, block) for index, blocks in enumerate(masked) for block in blocks}
        if not all_masked:
            return batches, 0, all_masked
        num_masked = sum((source, block) in all_masked for source, block in located[:, [0, 2]].tolist())
        return batches, num_masked, all_masked - bad

    def _gather(self, segment: Segment, located: I64, masked: list[set[int]], *, may_mask: bool) -> GatheredRows:
        """The rows at these addresses [n, 4]; `masked` by source index, see `TokenArena.gather`."""
        length, source = segment.sequence_length, located[:, 0]
        if len(self._arenas) == 1:
            return self._arenas[0].gather(located[:, 2], located[:, 3], length, masked[0], may_mask=may_mask)
        parts = [np.flatnonzero(source == index) for index in range(len(self._arenas))]
        of_sources = [
            arena.gather(located[part, 2], located[part, 3], length, masked[index], may_mask=may_mask)
            for index, (arena, part) in enumerate(zip(self._arenas, parts, strict=True))
        ]
        back = np.argsort(np.concatenate(parts), kind="stable")
        return GatheredRows(*(np.concatenate(arrays)[back] for arrays in zip(*of_sources, strict=True)))

    def _pack_rows(
        self, segment: Segment, names: list[tuple[int, int]], located: I64, bad: set[tuple[int, int]]
    ) -> tuple[list[Batch], int, set[tuple[int, int]]]:
        """As `_pack_gathered`, for any objective: row by row."""
        shape, rows = self._shape(segment), segment.micro_batch_size
        addresses = [RowAddress(*address) for address in located.tolist()]
        batches: list[Batch] = []
        masked_rows, found = 0, set[tuple[int, int]]()
        for position, (step, j) in enumerate(names):
            keys = [row_key(self._config.seed, step, j, number) if self._is_random else 0 for number in range(rows)]
            mine = addresses[position * rows : (position + 1) * rows]
            packed = [
                self._row(address, segment.sequence_length, bad, found, key)
                for address, key in zip(mine, keys, strict=True)
            ]
            masked_rows += sum(row is None for row in packed)
            key = dropout_key(self._config.seed, step, j)
            batches.append(make_batch(packed, shape, self._byte_lengths, index=j, key=key))
        return batches, masked_rows, found

    def _row(
        self, address: RowAddress, length: int, bad: set[tuple[int, int]], found: set[tuple[int, int]], key: int
    ) -> PackedRow | None:
        block = (address.source, address.block)
        if block in bad or block in found:
            return None
        try:
            return self._sources[address.source].row(address.block, address.row, key, length=length)
        except CorruptBlockError:
            if self._config.data.on_corrupt == "raise":
                raise
            found.add(block)
            return None

    def _send_for(self, steps: Sequence[I64], bad: set[tuple[int, int]]) -> None:
        """Asks for the blocks of these steps [n, 4], in the order of need, that are not here yet."""
        wanted = dict.fromkeys((source, block) for rows in steps for source, block in rows[:, [0, 2]].tolist())
        for index, source in enumerate(self._sources):
            if source.reader.is_remote:
                here: Container[int] = self._arenas[index] if self._arenas else ()
                blocks = [block for of_source, block in wanted if of_source == index and (index, block) not in bad]
                source.reader.request([block for block in blocks if block not in here])

    def _check_enough_rows(self) -> None:
        rows = {source.name: source.count_real_rows() for source in self._sources}
        longest = self._plan.base.row_tokens
        for number, batch in enumerate(self._sections):
            size, parts = batch.global_batch_size, longest // batch.sequence_length
            if sum(rows.values()) * parts < size:
                where = "batch" if number == 0 else f"data.stages.{number - 1}"
                found = ", ".join(f"{name} {count * parts}" for name, count in rows.items())
                raise DataError(
                    f"{where}.global_batch_size={size} is more than the {sum(rows.values()) * parts} rows of "
                    f"{batch.sequence_length} tokens that the sources hold ({found}). A step reads a global "
                    f"batch without repeating a row. Set a smaller {where}.global_batch_size or batch.sequence_length, "
                    "or add text."
                )


def _are_alike(states: Sequence[DataState]) -> bool:
    """Whether steps that follow each other are of one segment, and without a block that gives no labels."""
    first, last = states[0], states[-1]
    return last.started == first.started and not any(
        state.quarantine or state.segments is not first.segments for state in states
    )
