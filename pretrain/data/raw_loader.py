"""The loader of raw text (data.reading=raw): the same steps as `loader`, from tars that are tokenised as they are read.

Takes a config, byte lengths and this rank's place -> gives `StepData` by (step, state), for experiments.

Invariants: as in `loader`, but which rows a text gives is not known before, so a state holds a position per lane and
source, and every rank reads and tokenises all rows, of which it packs its own micro-batches: any number of ranks trains
the same rows, and a run goes on exactly with the same lanes. Nothing can be planned, jumped over or masked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pretrain.config.schema import RunConfig
from pretrain.data.batch import dropout_key, empty_batch, make_batch, sum_digests
from pretrain.data.documents import SourceSpec
from pretrain.data.format import Manifest
from pretrain.data.inputs import InputFile, list_files
from pretrain.data.objective import I64
from pretrain.data.objectives import TokenObjective, token_objective
from pretrain.data.order import RowOrder, SourceShape
from pretrain.data.permutation import derive_key
from pretrain.data.prefetch import await_rows
from pretrain.data.random_stream import row_key
from pretrain.data.raw_stream import RawLane, RawRow, deal_shards
from pretrain.data.rows import batch_shape
from pretrain.data.shares import shares_of
from pretrain.data.state import DataState, RawPosition, Segment, SegmentSource
from pretrain.data.step import StepData
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import DataError
from pretrain.sequence import Batch
from pretrain.topology import World


class _Source(NamedTuple):
    """A raw source: its tars, its lanes, what its rows become."""

    name: str
    sha256: str
    files: list[InputFile]
    lanes: list[RawLane]
    objective: TokenObjective


def open_raw(
    config: RunConfig, byte_lengths: NDArray[np.integer] | None, world: World, *, tokenizer_sha256: str | None = None
) -> RawLoader:
    """Opens the tars of a run.

    Raises:
        DataError: no tar where a path says, fewer than lanes, or another tokenizer than the run began with.
        StoreError: a server failed.
    """
    tokenizer = Tokenizer.load(config.tokenizer)
    if tokenizer_sha256 is not None and tokenizer.sha256 != tokenizer_sha256:
        raise DataError(
            f"tokenizer={config.tokenizer} is {tokenizer.sha256[:12]}, the run began with {tokenizer_sha256[:12]}. Ids "
            "mean something only with their own tokenizer. Restore the file."
        )
    header = tokenizer.manifest(name="raw", kind="tokens")
    if header.vocabulary_size > config.model.vocabulary_size:
        raise DataError(
            f"model.vocabulary_size={config.model.vocabulary_size} is below the {header.vocabulary_size} of the "
            f"tokenizer. Every id needs an embedding. Set model.vocabulary_size={header.vocabulary_size} or more."
        )
    length, lanes, sources = config.batch.sequence_length, config.data.lanes, []
    for name in sorted(config.data.sources):
        spec = SourceSpec((config.data.sources[name].path,), format="tar")
        files = sorted(list_files(spec), key=lambda file: file.name)
        dealt = deal_shards(files, config.seed, name, lanes)
        keys = [derive_key("raw lane 1", config.seed, name, lane) for lane in range(lanes)]
        objective = token_objective(config, header, f"data.sources.{name}", tokenizer.special_ids, row_tokens=length)
        streams = [RawLane(shards, key, spec, tokenizer, length) for shards, key in zip(dealt, keys, strict=True)]
        sources.append(_Source(name, _identity(files, tokenizer), files, streams, objective))
    return RawLoader(config, sources, header, byte_lengths, world)


def _identity(files: list[InputFile], tokenizer: Tokenizer) -> str:
    """The tokenizer, and what is known of the tars without reading them: names, sizes, times or a server's version."""
    known = [tokenizer.sha256, *([file.name, file.size, file.stamp] for file in files)]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


class RawLoader:
    """See the module; made by `loader.open_loader`. Use `close` (or `with`) to end its thread."""

    def __init__(
        self,
        config: RunConfig,
        sources: list[_Source],
        header: Manifest,
        byte_lengths: NDArray[np.integer] | None,
        world: World,
    ) -> None:
        self._config, self._sources, self._byte_lengths, self._world = config, sources, byte_lengths, world
        self._shape = batch_shape(config, header)
        batch, lanes = config.batch, config.data.lanes
        weights = [config.data.sources[source.name].weight for source in sources]
        self._segment = Segment(
            first_row=0,
            global_batch_size=batch.global_batch_size,
            micro_batch_size=batch.micro_batch_size,
            lanes=lanes,
            window_blocks=config.data.window_blocks,
            sequence_length=batch.sequence_length,
            row_tokens=batch.sequence_length,
            source_length=None,
            sources=tuple(
                SegmentSource(source.name, source.sha256, weight, len(source.files), 0)
                for source, weight in zip(sources, weights, strict=True)
            ),
        )
        # Only the mixture of the order: its rows are of no source.
        shapes = [SourceShape(s.name, 1, lanes, weight) for s, weight in zip(sources, weights, strict=True)]
        self._order = RowOrder(shapes, config.seed, lanes, 1)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pretrain-data")
        self._ahead: tuple[DataState, Future[tuple[StepData, DataState]]] | None = None
        self._following: dict[DataState, DataState] = {}

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names by source index."""
        return tuple(source.name for source in self._sources)

    def row_sources(self, state: DataState, index: int) -> I64:
        """Source index of each row of micro-batch `index` of the step that begins at `state`."""
        first = state.next_row + index * self._shape.rows
        return self._order.place_rows(np.arange(first, first + self._shape.rows, dtype=np.int64))[:, 0]

    def shares(self, after: DataState) -> dict[str, dict[str, float]]:
        """See `shares_of`; without epochs."""
        return shares_of(after, self._order)

    def initial_state(self) -> DataState:
        """The state of a run that has read nothing."""
        start = tuple(tuple(RawPosition() for _ in range(self._segment.lanes)) for _ in self._sources)
        return DataState(next_row=0, seed=self._config.seed, segments=(self._segment,), raw=start)

    def check(self, state: DataState) -> None:
        """Accepts a state that this config reads on. Raises DataError as `resume`."""
        self.resume(state)

    def resume(self, state: DataState) -> DataState:
        """The same state: a raw run goes on as it began.

        Raises:
            DataError: seed, tars, tokenizer, weights, lanes, lengths or batch size are not the state's, by name.
        """
        if state.seed != self._config.seed:
            raise DataError(
                f"seed={self._config.seed} is not the checkpoint's {state.seed}. The seed decides the order of rows. "
                f"Set seed={state.seed}, or start a new run."
            )
        theirs = state.segment
        for name in ("data.lanes", "batch.sequence_length", "batch.global_batch_size", "batch.micro_batch_size"):
            field = name.partition(".")[2]
            old, new = getattr(theirs, field), getattr(self._segment, field)
            if old != new:
                raise DataError(
                    f"{name}={new} is not the checkpoint's {old}. With data.reading=raw a run goes on only as it "
                    f"began. Set {name}={old}, or start a new run."
                )
        if theirs.sources != self._segment.sources or len(state.raw) != len(self._sources):
            raise DataError(
                "the tar files under data.sources (their names, sizes or times), their weights or the tokenizer are "
                "not the checkpoint's. With data.reading=raw a run goes on only with the files that it began with. "
                "Restore them, or start a new run."
            )
        return state

    def next_state(self, state: DataState) -> DataState:
        """The state after the step that begins at `state`; reads that step if it was not read."""
        if state not in self._following:
            self._following[state] = self._pool.submit(self._read, 0, state).result()[1]
        return self._following[state]

    def quarantine(self, state: DataState, blocks: Iterable[tuple[int, int]]) -> DataState:
        """Never needed: raw tars have no blocks that could be masked."""
        raise DataError(f"data.reading=raw masks no blocks, and {sorted(blocks)} were named.")

    def read(self, step: int, state: DataState, waiting: Callable[[], None] | None = None) -> StepData:
        """This rank's micro-batches of the step that begins at `state`; any step, in any order.

        Args:
            waiting: called twice a second while the rows are waited for.

        Raises:
            DataError: a tar is damaged or changed, or text is not UTF-8.
            StoreError: a server failed, or the rows did not come within health.data_timeout_s.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] != state:
            ahead = (state, self._pool.submit(self._read, step, state))
        limit_s = self._config.health.data_timeout_s
        data, following = await_rows(ahead[1], limit_s, f"the rows of step {step}", waiting)
        self._following = {state: following}
        self._ahead = (following, self._pool.submit(self._read, step + 1, following))
        return data

    def describe(self) -> str:
        """The data pipeline as a tree."""
        batch, quotas = self._segment, dict(zip(self.source_names, self._order.quotas, strict=True))
        lines = [f"data of {self._config.name}: raw text, tokenised by every rank"]
        lines += [
            f"├─ source {source.name}: {len(source.files)} tar files, {sum(f.size for f in source.files):,} bytes; "
            f"{quotas[source.name]} of {self._order.period} rows"
            for source in self._sources
        ]
        return "\n".join(
            [
                *lines,
                f"├─ order: seed {self._config.seed}, {batch.lanes} lanes; a run goes on with the same lanes only",
                f"├─ objective: {self._config.objective.kind}, rows of {batch.sequence_length} tokens",
                f"└─ step: {batch.global_batch_size} rows, {batch.slots_per_step:,} token slots",
            ]
        )

    def fetch_record(self) -> dict[str, float]:
        """Nothing is counted of raw reading."""
        return {}

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        self._pool.shutdown(cancel_futures=True)
        for source in self._sources:
            for lane in source.lanes:
                lane.close()

    def __enter__(self) -> RawLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, step: int, state: DataState) -> tuple[StepData, DataState]:
        """The step and the state behind it."""
        segment = self._segment
        rows, following = self._rows(state)
        micro_batches = segment.global_batch_size // segment.micro_batch_size
        batches = [self._batch(step, j, rows) for j in range(self._world.rank, micro_batches, self._world.size)]
        every_rank = -(-micro_batches // self._world.size)
        batches += [empty_batch(self._shape)] * (every_rank - len(batches))
        data = StepData(
            step=step,
            batches=tuple(batches),
            target_tokens=sum(batch.target_tokens for batch in batches),
            digest=sum_digests(batch.digest for batch in batches),
            masked_rows=0,
        )
        return data, following

    def _rows(self, state: DataState) -> tuple[list[tuple[int, RawRow]], DataState]:
        """(source, row) of every row of a step, and the state behind it."""
        positions = [list(lanes) for lanes in state.raw]
        numbers = np.arange(state.step_rows.start, state.step_rows.stop, dtype=np.int64)
        found = []
        for number, source in zip(numbers.tolist(), self._order.place_rows(numbers)[:, 0].tolist(), strict=True):
            lane = number % self._segment.lanes
            row, positions[source][lane] = self._sources[source].lanes[lane].read(positions[source][lane])
            found.append((source, row))
        raw = tuple(tuple(lanes) for lanes in positions)
        return found, replace(state.advance(self._segment.rows_per_step), raw=raw)

    def _batch(self, step: int, j: int, rows: list[tuple[int, RawRow]]) -> Batch:
        size, seed = self._segment.micro_batch_size, self._config.seed
        packed = [
            self._sources[source].objective.make(
                row.ids, row.ends, self._segment.sequence_length, row_key(seed, step, j, number)
            )
            for number, (source, row) in enumerate(rows[j * size : (j + 1) * size])
        ]
        return make_batch(packed, self._shape, self._byte_lengths, index=j, key=dropout_key(seed, step, j))
