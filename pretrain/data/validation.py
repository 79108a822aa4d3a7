"""Held-out sources, read in row order, the same every time and for every number of ranks.

Takes a config, byte lengths and this rank's place -> gives `ValidationSet`s by name.

Invariants: micro-batch j is rows [j*m, (j+1)*m) of the source, rank d of R takes j = d (mod R), filled up
with empty ones so that every rank does equally many; sums over all ranks do not depend on m or R.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from pretrain.config.batches import longest_batch
from pretrain.config.schema import RunConfig
from pretrain.data.batch import empty_batch, make_batch
from pretrain.data.blocks import CorruptBlockError
from pretrain.data.objective import PackedRow
from pretrain.data.prefetch import await_rows
from pretrain.data.random_stream import validation_key
from pretrain.data.rows import SourceRows, batch_shape, open_sources
from pretrain.sequence import Batch
from pretrain.topology import World


def open_validation(
    config: RunConfig,
    byte_lengths: NDArray[np.integer],
    world: World,
    *,
    tokenizer_sha256: str | None = None,
    special_ids: Mapping[str, int] | None = None,
) -> dict[str, ValidationSet]:
    """Opens the validation sources of a run, sorted by name.

    Raises:
        DataError: a source is missing, damaged or does not fit the run.
        StoreError: the storage failed.
    """
    sources = open_sources(config, "validation", tokenizer_sha256=tokenizer_sha256, special_ids=special_ids)
    return {name: ValidationSet(config, source, byte_lengths, world) for name, source in sources.items()}


class ValidationSet:
    """One held-out source.

    Attributes:
        name: as the config calls it.
        num_rows: rows that are evaluated: those that hold a document, at most eval.max_rows.
        num_batches: micro-batches per rank, the same on every rank.
        masked_rows: rows left out of the last pass because their block is corrupt (data.on_corrupt=mask).
    """

    def __init__(self, config: RunConfig, source: SourceRows, byte_lengths: NDArray[np.integer], world: World) -> None:
        self.name = source.name
        self._source, self._byte_lengths, self._world = source, byte_lengths, world
        self._masks = config.data.on_corrupt == "mask"
        self._timeout_s = config.health.data_timeout_s
        self._shape = batch_shape(config, source.manifest, longest_batch(config))  # the same all through the run
        self.num_rows = min(source.count_real_rows(), config.eval.max_rows or source.num_rows)
        self._num_microbatches = -(-self.num_rows // self._shape.rows)
        self.num_batches = -(-self._num_microbatches // world.size)
        self.masked_rows = 0

    def batches(self, waiting: Callable[[], None] | None = None) -> Iterator[Batch]:
        """This rank's micro-batches; each pass begins at the first row.

        Args:
            waiting: called twice a second while rows are waited for.

        Raises:
            CorruptBlockError: a block is damaged and data.on_corrupt is raise.
            StoreError: the storage failed, or rows did not come within health.data_timeout_s.
        """
        self.masked_rows = 0
        pool = ThreadPoolExecutor(1, thread_name_prefix="validation")
        try:
            for turn in range(self.num_batches):
                j = turn * self._world.size + self._world.rank
                what = f"the rows of batch {turn} of data.validation.{self.name}"
                yield await_rows(pool.submit(self._batch, j), self._timeout_s, what, waiting)
        finally:
            pool.shutdown(wait=False)  # one that is stuck in the file system is left to it

    def _batch(self, j: int) -> Batch:
        if j >= self._num_microbatches:
            return empty_batch(self._shape)
        first = j * self._shape.rows
        rows = [self._row(number) for number in range(first, min(first + self._shape.rows, self.num_rows))]
        return make_batch(rows, self._shape, self._byte_lengths, index=j, key=0)

    def _row(self, number: int) -> PackedRow | None:
        try:
            return self._source.row(*divmod(number, self._source.rows_per_block), validation_key(number))
        except CorruptBlockError:
            if not self._masks:
                raise
            self.masked_rows += 1
            return None
