"""Encodes one bucket of documents: sort, drop duplicates, tokenise, write the parts that packing reads.

Takes a bucket file and an `EncodeJob` -> gives up to two part files (train, validation) and counts.
Run in worker processes (`python -m pretrain.data.encode`, a JSON line per task on stdin, one per
result on stdout; the end of stdin ends it) or in the builder's own process: the bytes are the same.
Invariants: memory is one bucket; every document ends with eos on each side.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.format import Provenance, decode_provenance, encode_provenance
from pretrain.data.spill import Spilled, read_sorted
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import PretrainError

SPLITS = ("train", "validation")
_BATCH_CHARACTERS = 2**20


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """What is the same for all buckets.

    Attributes:
        tokenizer: path of tokenizer.json.
        limit: hex of the selection's limit: documents with a smaller identity are kept; None keeps all.
        source_capacity, target_capacity: of a row of pairs; 0 for plain text.
    """

    tokenizer: str
    limit: str | None
    source_capacity: int
    target_capacity: int


@dataclass(frozen=True, slots=True)
class EncodeCounts:
    """What happened to a bucket's documents."""

    text_bytes: int = 0
    duplicates: int = 0
    not_selected: int = 0
    too_long: int = 0

    def __add__(self, other: EncodeCounts) -> EncodeCounts:
        return EncodeCounts(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))


@dataclass(frozen=True, slots=True)
class Part:
    """The encoded documents of one bucket and split, in corpus order.

    Attributes:
        ids, lengths: of the (target) side, each document with its eos.
        source_ids, source_lengths: of the source side (pairs), else empty.
        text_bytes: int64 per document, both sides.
        provenance: per document.
    """

    ids: np.ndarray
    lengths: np.ndarray
    source_ids: np.ndarray
    source_lengths: np.ndarray
    text_bytes: np.ndarray
    provenance: list[Provenance]

    def save(self, path: Path) -> None:
        where = np.frombuffer(encode_provenance(self.provenance), dtype=np.uint8)
        with path.open("wb") as file:
            for array in (self.ids, self.lengths, self.source_ids, self.source_lengths, self.text_bytes, where):
                np.save(file, array, allow_pickle=False)

    @classmethod
    def load(cls, path: Path) -> Part:
        with path.open("rb") as file:
            arrays = [np.load(file, allow_pickle=False) for _ in range(6)]
        ids, lengths, source_ids, source_lengths, text_bytes, where = arrays
        return cls(ids, lengths, source_ids, source_lengths, text_bytes, decode_provenance(where.tobytes())[0])


def part_path(bucket: Path, split: str) -> Path:
    """Where the part of a bucket and split lies."""
    return bucket.with_suffix(f".{split}")


def encode_bucket(bucket: Path, job: EncodeJob, tokenizer: Tokenizer) -> EncodeCounts:
    """Writes the parts of one bucket and removes the bucket."""
    documents = read_sorted(bucket)
    selected = [item for item in documents if job.limit is None or item.identity.hex() < job.limit]
    # Equal identities have equal order keys, so duplicates are neighbours; the first in reading order stays.
    distinct = [
        item for place, item in enumerate(selected) if not place or item.identity != selected[place - 1].identity
    ]
    too_long = 0
    for validation, split in enumerate(SPLITS):
        chosen = [item for item in distinct if item.validation == validation]
        if chosen:
            part, dropped = _encode(chosen, job, tokenizer)
            part.save(part_path(bucket, split))
            too_long += dropped
    bucket.unlink()
    return EncodeCounts(
        text_bytes=sum(len(item.text) + len(item.target or b"") for item in documents),
        duplicates=len(selected) - len(distinct),
        not_selected=len(documents) - len(selected),
        too_long=too_long,
    )


def _encode(documents: list[Spilled], job: EncodeJob, tokenizer: Tokenizer) -> tuple[Part, int]:
    """The part of these documents, and how many pairs do not fit a row."""
    text_bytes = np.array([len(item.text) + len(item.target or b"") for item in documents], dtype=np.int64)
    provenance = [
        Provenance(item.id, item.origin, item.line, json.loads(item.metadata) if item.metadata else None)
        for item in documents
    ]
    if not job.target_capacity:
        ids, lengths = _encode_texts([item.text.decode() for item in documents], tokenizer)
        nothing = np.zeros(0, dtype=np.int64)
        return Part(ids, lengths, nothing, nothing, text_bytes, provenance), 0
    source_ids, source_lengths = _encode_texts([item.text.decode() for item in documents], tokenizer)
    ids, lengths = _encode_texts([(item.target or b"").decode() for item in documents], tokenizer)
    fits = (source_lengths < job.source_capacity) & (lengths < job.target_capacity)
    part = Part(
        ids=ids[np.repeat(fits, lengths)],
        lengths=lengths[fits],
        source_ids=source_ids[np.repeat(fits, source_lengths)],
        source_lengths=source_lengths[fits],
        text_bytes=text_bytes[fits],
        provenance=[item for item, fit in zip(provenance, fits, strict=True) if fit],
    )
    return part, int((~fits).sum())


def _encode_texts(texts: list[str], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """(ids of all texts with eos after each, lengths with it)."""
    ids_of_batches, lengths_of_batches = [], []
    for batch in _batches(texts):
        ids, lengths = tokenizer.encode_flat(batch)
        ids_of_batches.append(np.insert(ids, np.cumsum(lengths), tokenizer.eos_id))
        lengths_of_batches.append(lengths + 1)
    return np.concatenate(ids_of_batches), np.concatenate(lengths_of_batches)


def _batches(texts: list[str]) -> Iterator[Sequence[str]]:
    start = size = 0
    for stop, text in enumerate(texts, start=1):
        size += len(text)
        if size >= _BATCH_CHARACTERS or stop == len(texts):
            yield texts[start:stop]
            start, size = stop, 0


def _serve() -> None:
    """The worker: first line the job, then a bucket path per line; answers counts or an error per line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the builder, which closes our stdin
    job = EncodeJob(**json.loads(sys.stdin.readline()))
    tokenizer = Tokenizer.load(job.tokenizer)
    for line in sys.stdin:
        answer: dict[str, Any]
        try:
            answer = asdict(encode_bucket(Path(json.loads(line)), job, tokenizer))
        except PretrainError as error:
            answer = {"error": str(error)}
        except OSError as error:
            answer = {"error": f"cannot write {error.filename}: {error.strerror}. Free space or choose another --out."}
        except Exception as error:  # the library raises bare Exception; the builder names the worker's cause
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    try:
        _serve()
    except BrokenPipeError:  # the builder was killed
        os._exit(1)
