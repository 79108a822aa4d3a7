"""A source opened for a run: block readers plus the objective, giving rows by (block, row).

Takes a config -> gives `SourceRows` by name, sorted by name, checked against the config and each other.
Invariants: what a row holds depends on nothing but the source and the shape of the run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from pretrain.config.batches import batches_of, longest_batch
from pretrain.config.capacity import row_capacity
from pretrain.config.schema import BatchConfig, RunConfig, SourceConfig
from pretrain.data.batch import BatchShape
from pretrain.data.blocks import BlockReader, PairBlock, TokenBlock, is_remote
from pretrain.data.cache import BlockCache
from pretrain.data.fetch import Fetcher
from pretrain.data.format import Manifest, read_manifest
from pretrain.data.objective import I64, PackedRow, seq2seq_row
from pretrain.data.objectives import NEED_SPECIAL_IDS, TokenObjective, causal_objective, token_objective
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import DataError
from pretrain.log import Log
from pretrain.sequence import IGNORED_LABEL
from pretrain.store import open_store


class SourceRows:
    """Rows of one source.

    Args:
        name: as the config calls it.
        reader: its blocks.
        shape: of the run's micro-batches.
        objective: what rows of plain text become; none means causal, at the shape's length.
        shorter: the same for rows that are parts of those.
    """

    def __init__(
        self,
        name: str,
        reader: BlockReader,
        shape: BatchShape,
        objective: TokenObjective | None = None,
        shorter: Sequence[TokenObjective] = (),
    ) -> None:
        self.name, self.reader, self.manifest = name, reader, reader.manifest
        self._shape, self._objective = shape, objective or causal_objective(shape.sequence_length)
        self._objectives = {one.row_tokens: one for one in (self._objective, *shorter)}
        self.rows_per_block = self.manifest.rows_per_block_at(self._objective.row_tokens)

    @property
    def num_rows(self) -> int:
        """Numbered rows N*B, those of the last block that hold only padding included."""
        return self.manifest.blocks * self.rows_per_block

    def count_real_rows(self) -> int:
        """Rows that hold at least one document. Reads the last block of a source whose rows hold whole documents.

        Raises:
            DataError: that block is damaged.
        """
        if not self.manifest.packed:
            return -(-self.manifest.tokens // self._objective.row_tokens)
        last = self.reader.read(self.manifest.blocks - 1)
        ends = last.target_ends if isinstance(last, PairBlock) else last.ends
        used = -(-int(ends[-1]) // (self.manifest.target_capacity or self.manifest.row_tokens)) if ends.size else 0
        return (self.manifest.blocks - 1) * self.rows_per_block + used

    def row(self, block: int, row: int, key: int = 0, *, length: int | None = None) -> PackedRow:
        """One row.

        Args:
            key: what is random in it follows this (objectives that are not random ignore it).
            length: of the rows of the block that are counted; the longest if not given.

        Raises:
            CorruptBlockError, StoreError, DataError: see `BlockReader.read`.
        """
        content = self.reader.read(block)
        if isinstance(content, TokenBlock):
            objective = self._objectives[length or self._objective.row_tokens]
            length = objective.row_tokens
            start = row * length
            ends = _within(content.ends, start, length)
            if self.manifest.row_tokens:  # whole documents, then the row's own padding
                num_real = int(ends[-1]) if ends.size else 0
            else:
                num_real = min(max(content.real_tokens - start, 0), length)
            made = objective.make(content.ids[start : start + length + 1], ends, num_real, key)
            if content.trained is None:
                return made
            trained = content.trained[start + 1 : start + num_real + 1]  # a label is the token behind its place
            return replace(made, labels=np.where(trained, made.labels, IGNORED_LABEL))
        source_length, target_length = self.manifest.source_capacity, self.manifest.target_capacity
        source, target = row * source_length, row * target_length
        source_ends = _within(content.source_ends, source, source_length)
        target_ends = _within(content.target_ends, target, target_length)
        self._check_pairs(block, row, source_ends, target_ends)
        return seq2seq_row(
            content.source_ids[source : source + source_length],
            source_ends,
            content.target_ids[target : target + target_length],
            target_ends,
            self._shape.start_id,
        )

    def _check_pairs(self, block: int, row: int, source_ends: I64, target_ends: I64) -> None:
        num_source = int(source_ends[-1]) if source_ends.size else 0
        num_target = int(target_ends[-1]) if target_ends.size else 0
        full = num_source >= self.manifest.source_capacity or num_target >= self.manifest.target_capacity
        if source_ends.size != target_ends.size or full:
            raise DataError(
                f"row {row} of block {block} of source {self.name} holds {source_ends.size} source and "
                f"{target_ends.size} target documents ({num_source} and {num_target} tokens). Both sides hold the same "
                "documents and one free slot each. Build the source again with `pretrain data build`."
            )


def open_sources(
    config: RunConfig,
    section: Literal["sources", "validation"],
    *,
    tokenizer_sha256: str | None = None,
    special_ids: Mapping[str, int] | None = None,
) -> dict[str, SourceRows]:
    """Opens the training or validation sources of a run, sorted by name.

    Args:
        tokenizer_sha256: of the run's tokenizer; read from the file config.tokenizer if not given.
        special_ids: its control ids by name; read likewise where the objective needs them.

    Raises:
        DataError: a source that is missing, damaged, of the wrong kind, or built with another tokenizer, vocabulary
            or length than the run has.
        StoreError: the storage failed.
    """
    if config.data.reading == "raw" and section == "sources":
        raise DataError(
            "data.reading=raw has no rows that can be told before they are read. Plans, mixtures and explanations need "
            "built sources. Build them with `pretrain data build`, and set data.reading=blocks."
        )
    named: Mapping[str, SourceConfig] = getattr(config.data, section)
    wanted = tokenizer_sha256 or _file_sha256(config.tokenizer)
    if special_ids is None and config.objective.kind in NEED_SPECIAL_IDS:
        special_ids = Tokenizer.load(config.tokenizer).special_ids
    cache = None if config.data.cache is None else BlockCache(config.data.cache, config.data.cache_bytes)
    kept_blocks = config.data.lanes * config.data.window_blocks + 2 if section == "sources" else 2
    sections = batches_of(config.batch, config.data.stages)
    lengths = sorted({batch.sequence_length for batch in sections}, reverse=True)
    opened = {}
    for name in sorted(named):
        field = f"data.{section}.{name}"
        store = open_store(named[name].path)
        manifest = Fetcher(store, is_remote=is_remote(store), log=Log()).patiently(partial(read_manifest, store))
        _check_fit(manifest, config, field, wanted)
        reader = BlockReader(store, manifest, name=name, kept_blocks=kept_blocks, cache=cache)
        objectives = [token_objective(config, manifest, field, special_ids, row_tokens=length) for length in lengths]
        shape = batch_shape(config, manifest, longest_batch(config))
        opened[name] = SourceRows(name, reader, shape, objectives[0], objectives[1:])
    return opened


def batch_shape(config: RunConfig, manifest: Manifest, batch: BatchConfig | None = None) -> BatchShape:
    """The shape of micro-batches; the ids of padding and start are the tokenizer's.

    Args:
        batch: the section that holds then; `config.batch` if not given.
    """
    batch = batch or config.batch
    capacity = row_capacity(config.objective, batch, config.model.layout)
    return BatchShape(
        rows=batch.micro_batch_size,
        sequence_length=capacity.target,
        source_length=capacity.source,
        pad_id=manifest.pad_id,
        start_id=manifest.start_id,
    )


def _check_fit(manifest: Manifest, config: RunConfig, field: str, tokenizer_sha256: str) -> None:
    wanted_kind = "pairs" if config.objective.kind == "seq2seq" else "tokens"
    if manifest.kind != wanted_kind:
        raise DataError(
            f"{field} is a source of {manifest.kind}. objective.kind={config.objective.kind} reads {wanted_kind}. "
            "Change objective.kind, or build the source from documents of the other kind."
        )
    if manifest.masked and config.objective.kind != "causal_lm":
        raise DataError(
            f"objective.kind={config.objective.kind} does not fit {field}, which says what of a document is trained. "
            "Such a source is read as it stands. Set objective.kind=causal_lm, or build the source without trained "
            "parts."
        )
    if manifest.tokenizer_sha256 != tokenizer_sha256:
        raise DataError(
            f"{field} was built with tokenizer {manifest.tokenizer_sha256[:12]}, but tokenizer={config.tokenizer} "
            f"is {tokenizer_sha256[:12]}. Ids mean something only with their own tokenizer. "
            "Set tokenizer to the file that data build used, or build again."
        )
    if manifest.vocabulary_size > config.model.vocabulary_size:
        raise DataError(
            f"model.vocabulary_size={config.model.vocabulary_size} is below the {manifest.vocabulary_size} of {field}. "
            f"Every id needs an embedding. Set model.vocabulary_size={manifest.vocabulary_size} or more."
        )
    for batch in batches_of(config.batch, config.data.stages):
        manifest.rows_per_block_at(batch.sequence_length)
    if manifest.kind == "pairs" and config.batch.source_length != manifest.source_capacity:
        raise DataError(
            f"batch.source_length={config.batch.source_length} does not fit {field}. The writer packed its pairs for "
            f"{manifest.source_capacity} source tokens. Set batch.source_length={manifest.source_capacity}."
        )


def _within(ends: I64, start: int, length: int) -> I64:
    """Ends in (start, start + length], relative to start."""
    first, last = ends.searchsorted((start + 1, start + length + 1))
    return ends[first:last] - start


def _file_sha256(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(
            f"tokenizer={path} cannot be read: {error.strerror}. A run names the tokenizer.json that its sources were "
            "built with. Correct the path."
        ) from None
