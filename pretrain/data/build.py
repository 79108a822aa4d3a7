"""Builds sources: raw text -> shuffled, split, tokenised, packed block shards.

Takes `BuildOptions` -> gives OUT (or OUT/train and OUT/validation with a validation fraction), complete or
not at all, and a `BuildReport`. Phases: read (hash and spill into buckets), encode (worker
processes), assemble (packing and writing, in corpus order, while later buckets are encoded).
Invariants: the bytes are a function of inputs and options, not of workers, memory or time; memory is
bounded by buckets, not by the corpus; whatever is left out is counted.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrain.data.assemble import Assembler, open_assembler
from pretrain.data.build_options import BuildOptions
from pretrain.data.encode import SPLITS, EncodeCounts, EncodeJob, Part, part_path
from pretrain.data.encode_pool import EncodePool
from pretrain.data.format import Manifest, dtype_for
from pretrain.data.output import OutputDirectory
from pretrain.data.selection import Selection, identity, is_validation, nothing_to_build, order_key
from pretrain.data.sources import ReadCounts, list_files, read_documents
from pretrain.data.spill import Spill, Spilled, num_buckets_for
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import DataError, StoreError

__all__ = ["BuildOptions", "BuildProgress", "BuildReport", "build"]

_IN_PROCESS_BYTES = 2 * 2**20  # below, starting workers costs more than it gives
_REPORT_EVERY_DOCUMENTS = 256


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """Where a build is: `phase` read or encode, bytes of text done, all of them once known, files of the inputs."""

    phase: str
    done_bytes: int
    total_bytes: int | None
    elapsed_s: float
    files: int


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build did. Every document that was read is in a source or in one of the counts.

    Attributes:
        sources: directory of each split that was built, with its manifest.
        read_bytes: text that was read.
        empty, invalid, duplicates, not_selected, too_long: documents left out, by reason.
        other_members: members of raw tars that hold no text.
        repaired: texts with lone surrogates, which were replaced.
        seconds: wall clock.
    """

    sources: dict[str, tuple[str, Manifest]]
    files: int
    documents_read: int
    read_bytes: int
    empty: int
    invalid: int
    invalid_examples: tuple[str, ...]
    repaired: int
    other_members: int
    duplicates: int
    not_selected: int
    too_long: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        values["sources"] = {
            split: {"path": path}
            | {key: value for key, value in manifest.body().items() if key != "shards"}
            | {"sha256": manifest.sha256, "shards": len(manifest.shards)}
            for split, (path, manifest) in self.sources.items()
        }
        return values


def build(options: BuildOptions, progress: Callable[[BuildProgress], None] | None = None) -> BuildReport:
    """Builds what `options` say; see the module's text.

    Raises:
        DataError: bad input, an empty corpus or split, OUT exists or is being built.
        StoreError: the disk is full or not writable.
        PretrainError: a worker died.
    """
    return _Build(options, progress or (lambda _: None)).run()


class _Build:
    """One build: the values that its phases hand to each other."""

    def __init__(self, options: BuildOptions, progress: Callable[[BuildProgress], None]) -> None:
        self._options = options
        self._progress = progress
        self._started = time.monotonic()
        self._reads = ReadCounts()
        self._read_bytes = 0
        self._spilled_bytes = 0
        self._not_selected = 0
        self._num_files = 0

    def run(self) -> BuildReport:
        options = self._options
        tokenizer = Tokenizer.load(options.tokenizer)
        output = OutputDirectory(options.out)
        files = list_files(options.source)
        expected = sum(file.text_bytes for file in files)
        self._num_files = len(files)
        try:
            with output, EncodePool(self._num_workers(expected), output.fileno()) as pool:
                buckets, limit = self._read(output.work / "buckets", num_buckets_for(expected))
                job = EncodeJob(options.tokenizer, limit, options.source_length, options.target_length)
                encoding = pool.encode(buckets, job)
                manifests, counts = self._assemble(buckets, encoding, tokenizer, output.partial)
                output.commit()
        except OSError as error:
            raise StoreError(
                f"cannot write {error.filename or options.out}: {error.strerror}. Free space or choose another --out."
            ) from error
        reads = self._reads
        return BuildReport(
            sources={split: (str(self._directory(output.out, split)), found) for split, found in manifests.items()},
            files=reads.files,
            documents_read=reads.documents,
            read_bytes=self._read_bytes,
            empty=reads.empty,
            invalid=reads.invalid,
            invalid_examples=tuple(reads.invalid_examples),
            repaired=reads.repaired,
            other_members=reads.other_members,
            duplicates=counts.duplicates,
            not_selected=self._not_selected + counts.not_selected,
            too_long=counts.too_long,
            seconds=time.monotonic() - self._started,
        )

    def _read(self, directory: Path, num_buckets: int) -> tuple[list[Path], str | None]:
        """Spills all documents -> (bucket files in order, the selection's limit as hex)."""
        options = self._options
        selection = Selection(options.max_bytes)
        spill = Spill(directory, num_buckets)
        for ordinal, document in enumerate(read_documents(options.source, self._reads)):
            text = document.text.encode()
            target = None if document.target is None else document.target.encode()
            size = len(text) + len(target or b"")
            self._read_bytes += size
            key = identity(text, target, None if options.deduplicate else ordinal)
            if selection.offer(key, size):
                self._spilled_bytes += size
                held_out = options.validation_fraction > 0 and is_validation(text, options.validation_fraction)
                where = (document.line, held_out, document.id, document.origin)
                kept = b"" if document.metadata is None else json.dumps(document.metadata, default=str).encode()
                spill.add(Spilled(order_key(key, options.seed), key, ordinal, *where, text, target, kept))
            else:
                self._not_selected += 1
            if ordinal % _REPORT_EVERY_DOCUMENTS == 0:
                self._report("read", self._read_bytes, None)
        buckets = spill.close()
        if not buckets:
            raise nothing_to_build(options.source, options.max_bytes)
        return buckets, None if selection.limit is None else selection.limit.hex()

    def _assemble(
        self, buckets: list[Path], encoding: Iterator[EncodeCounts], tokenizer: Tokenizer, directory: Path
    ) -> tuple[dict[str, Manifest], EncodeCounts]:
        options = self._options
        splits = SPLITS if options.validation_fraction else SPLITS[:1]
        assemblers: dict[str, Assembler] = {
            split: open_assembler(
                self._directory(directory, split), self._header(tokenizer, split), shard_blocks=options.shard_blocks
            )
            for split in splits
        }
        total = EncodeCounts()
        for bucket, counts in zip(buckets, encoding, strict=True):
            total += counts
            for split, assembler in assemblers.items():
                path = part_path(bucket, split)
                if path.exists():
                    assembler.add(Part.load(path))
                    path.unlink()
            self._report("encode", total.text_bytes, self._spilled_bytes)
        for split, assembler in assemblers.items():
            if not assembler.documents:
                raise self._empty_split(split, total)
        return {split: assembler.finish() for split, assembler in assemblers.items()}, total

    def _directory(self, root: Path, split: str) -> Path:
        return root / split if self._options.validation_fraction else root

    def _header(self, tokenizer: Tokenizer, split: str) -> Manifest:
        options, source = self._options, self._options.source
        name = options.name or Path(options.out).absolute().name
        pairs = source.pairs
        return Manifest(
            name=f"{name}-validation" if split == "validation" else name,
            kind="pairs" if pairs else "tokens",
            tokenizer_sha256=tokenizer.sha256,
            vocabulary_size=tokenizer.vocabulary_size,
            dtype=dtype_for(tokenizer.vocabulary_size),
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            start_id=tokenizer.start_id,
            block_tokens=0 if pairs else options.block_tokens,
            rows_per_block=options.rows_per_block if pairs else 0,
            source_capacity=options.source_length,
            target_capacity=options.target_length,
            options={
                "source": {
                    key: list(value) if isinstance(value, tuple) else value for key, value in asdict(source).items()
                },
                "split": split,
                "validation_fraction": options.validation_fraction,
                "seed": options.seed,
                "deduplicate": options.deduplicate,
                "max_bytes": options.max_bytes,
                "shard_blocks": options.shard_blocks,
            },
        )

    def _num_workers(self, expected_bytes: int) -> int:
        if self._options.workers is not None:
            return self._options.workers
        kept = min(expected_bytes, self._options.max_bytes or expected_bytes)
        return 1 if kept < _IN_PROCESS_BYTES else len(os.sched_getaffinity(0))

    def _empty_split(self, split: str, counts: EncodeCounts) -> DataError:
        options = self._options
        if counts.too_long and not options.validation_fraction:
            return DataError(
                f"source_length={options.source_length}, target_length={options.target_length}: none of the "
                f"{counts.too_long} pairs fits a row. Each side with its end token needs a slot less than its length. "
                "Raise --source-length and --target-length."
            )
        return DataError(
            f"validation_fraction={options.validation_fraction:g} leaves no document for {split} (documents read: "
            f"{self._reads.documents}). Both parts need at least one. Change --validation-fraction or give more text."
        )

    def _report(self, phase: str, done_bytes: int, total_bytes: int | None) -> None:
        self._progress(BuildProgress(phase, done_bytes, total_bytes, time.monotonic() - self._started, self._num_files))
