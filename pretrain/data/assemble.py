"""Encoded parts -> a source directory: feeds packing in corpus order and hands blocks to the writer.

Takes the parts of one split, bucket by bucket -> gives the finished manifest.
Invariants: memory is one part and the open rows; what comes out does not depend on where parts end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from pretrain.data.encode import Part
from pretrain.data.format import Manifest, Provenance, encode_provenance
from pretrain.data.packing import BlockCutter, CutBlock, FirstFitPacker, lay_out_rows
from pretrain.data.shard_writer import BlockCounts, SourceWriter

Assembler: TypeAlias = "TextAssembler | PairAssembler"


def open_assembler(directory: Path, header: Manifest, *, shard_blocks: int) -> Assembler:
    """The assembler of the manifest's kind, writing to `directory`."""
    writer = SourceWriter(directory, header, shard_blocks=shard_blocks)
    return PairAssembler(writer, header) if header.kind == "pairs" else TextAssembler(writer, header)


class TextAssembler:
    """Concatenates documents into blocks."""

    def __init__(self, writer: SourceWriter, header: Manifest) -> None:
        self._writer = writer
        self._cutter = BlockCutter(header.block_tokens, eos_id=header.eos_id, pad_id=header.pad_id)
        self._pending: deque[tuple[Provenance, int]] = deque()  # documents that did not end in a written block
        self.documents = 0

    def add(self, part: Part) -> None:
        self.documents += len(part.lengths)
        self._pending.extend(zip(part.provenance, part.text_bytes.tolist(), strict=True))
        self._write(self._cutter.add(part.ids, part.lengths))

    def finish(self) -> Manifest:
        with self._writer:
            self._write(self._cutter.finish())
            return self._writer.close()

    def _write(self, blocks: Iterable[CutBlock]) -> None:
        for block in blocks:
            here = list(islice(self._pending, block.num_documents))
            ended = [self._pending.popleft() for _ in range(len(block.ends))]
            self._writer.add(
                [block.ids, block.ends],
                encode_provenance([origin for origin, _ in here], continued=block.continued),
                BlockCounts(
                    documents=len(ended),
                    tokens=block.real_tokens,
                    source_tokens=0,
                    text_bytes=sum(size for _, size in ended),
                ),
            )


class _Pair(NamedTuple):
    source: np.ndarray
    target: np.ndarray
    provenance: Provenance
    text_bytes: int


class PairAssembler:
    """Packs pairs into rows and rows into blocks."""

    def __init__(self, writer: SourceWriter, header: Manifest) -> None:
        self._writer = writer
        self._header = header
        self._packer = FirstFitPacker(header.source_capacity, header.target_capacity)
        self._pending: dict[int, _Pair] = {}  # pairs in open rows
        self._rows: list[list[_Pair]] = []
        self.documents = 0

    def add(self, part: Part) -> None:
        sources = np.split(part.source_ids, np.cumsum(part.source_lengths)[:-1])
        targets = np.split(part.ids, np.cumsum(part.lengths)[:-1])
        for source, target, provenance, size in zip(
            sources[: len(part.lengths)],
            targets[: len(part.lengths)],
            part.provenance,
            part.text_bytes.tolist(),
            strict=True,
        ):
            self._pending[self.documents] = _Pair(source.copy(), target.copy(), provenance, size)
            closed = self._packer.add(self.documents, len(source), len(target))
            self.documents += 1
            if closed is not None:
                self._close_row(closed)

    def finish(self) -> Manifest:
        with self._writer:
            for row in self._packer.finish():
                self._close_row(row)
            if self._rows:
                self._write_block()
            return self._writer.close()

    def _close_row(self, documents: list[int]) -> None:
        self._rows.append([self._pending.pop(document) for document in documents])
        if len(self._rows) == self._header.rows_per_block:
            self._write_block()

    def _write_block(self) -> None:
        header, rows = self._header, self._rows
        size = header.rows_per_block
        source_ids, source_ends = lay_out_rows(
            [[pair.source for pair in row] for row in rows], size, header.source_capacity, header.pad_id
        )
        target_ids, target_ends = lay_out_rows(
            [[pair.target for pair in row] for row in rows], size, header.target_capacity, header.pad_id
        )
        pairs = [pair for row in rows for pair in row]
        self._writer.add(
            [source_ids, source_ends, target_ids, target_ends],
            encode_provenance([pair.provenance for pair in pairs]),
            BlockCounts(
                documents=len(pairs),
                tokens=sum(len(pair.target) for pair in pairs),
                source_tokens=sum(len(pair.source) for pair in pairs),
                text_bytes=sum(pair.text_bytes for pair in pairs),
            ),
        )
        self._rows = []
