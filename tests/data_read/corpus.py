"""Small sources written block by block from numbered documents, and the configs that read them.

The blocks are cut here by plain slicing of one list, independently of the package's packing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.config.schema import RunConfig
from pretrain.data.format import Manifest, Provenance, encode_provenance
from pretrain.data.shard_writer import BlockCounts, SourceWriter
from pretrain.errors import StoreError
from pretrain.store import NotFoundError, Store

VOCABULARY = 300
EOS, PAD, START = 0, 1, 2
BYTE_LENGTHS = np.array([0, 0, 0] + [1 + i % 4 for i in range(VOCABULARY - 3)], dtype=np.int32)


def write_tokenizer_file(directory: Path) -> Path:
    """A file with a hash: of a tokenizer the loader reads no more, ids are made by the tests."""
    path = directory / "tokenizer.json"
    path.write_bytes(b"{}")
    return path


def header(name: str, tokenizer: Path, **layout: Any) -> Manifest:
    sha256 = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    return Manifest(
        name=name,
        tokenizer_sha256=sha256,
        vocabulary_size=VOCABULARY,
        dtype="u2",
        eos_id=EOS,
        pad_id=PAD,
        start_id=START,
        **layout,
    )


def random_documents(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Documents of 1 to `longest` tokens, the end-of-text id included as the last."""
    rng = np.random.default_rng(seed)
    return [[*rng.integers(3, VOCABULARY, rng.integers(0, longest)).tolist(), EOS] for _ in range(count)]


def write_tokens(
    directory: Path,
    documents: list[list[int]],
    tokenizer: Path,
    *,
    block_tokens: int = 64,
    shard_blocks: int = 3,
    name: str = "text",
) -> Manifest:
    """A source of kind tokens."""
    stream = [token for document in documents for token in document]
    ends = np.cumsum([len(document) for document in documents])
    num_blocks = -(-len(stream) // block_tokens)
    filled = stream + [PAD] * (num_blocks * block_tokens - len(stream)) + [EOS]
    layout = header(name, tokenizer, kind="tokens", block_tokens=block_tokens)
    with SourceWriter(directory, layout, shard_blocks=shard_blocks) as writer:
        for block in range(num_blocks):
            start, stop = block * block_tokens, (block + 1) * block_tokens
            inside = [int(end) - start for end in ends if start < end <= stop]
            real = min(stop, len(stream)) - start
            touched = [
                Provenance(f"doc-{k}", "made.jsonl", k + 1)
                for k, end in enumerate(ends)
                if end > start and end - len(documents[k]) < min(stop, len(stream))
            ]
            continued = bool(start) and start not in ends
            writer.add(
                [np.array(filled[start : stop + 1]), np.array(inside, dtype=np.int64)],
                encode_provenance(touched, continued=continued),
                BlockCounts(len(inside), real, 0, real),
            )
        return writer.close()


@dataclass
class PairRows:
    """Pairs packed into rows, first come first served; the reference that the tests compare with."""

    rows: list[list[tuple[list[int], list[int]]]] = field(default_factory=list)

    @classmethod
    def pack(cls, pairs: list[tuple[list[int], list[int]]], source: int, target: int) -> PairRows:
        rows: list[list[tuple[list[int], list[int]]]] = [[]]
        for pair in pairs:
            row = rows[-1]
            if (
                sum(len(s) for s, _ in row) + len(pair[0]) > source - 1
                or sum(len(t) for _, t in row) + len(pair[1]) > target - 1
            ):
                rows.append([])
            rows[-1].append(pair)
        return cls(rows)


def random_pairs(count: int, longest: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    source, target = random_documents(count, longest, seed), random_documents(count, longest, seed + 1)
    return list(zip(source, target, strict=True))


def write_pairs(
    directory: Path,
    pairs: list[tuple[list[int], list[int]]],
    tokenizer: Path,
    *,
    rows_per_block: int = 4,
    source: int = 24,
    target: int = 16,
    shard_blocks: int = 3,
) -> PairRows:
    """A source of kind pairs."""
    packed = PairRows.pack(pairs, source, target)
    layout = header(
        "pairs",
        tokenizer,
        kind="pairs",
        rows_per_block=rows_per_block,
        source_capacity=source,
        target_capacity=target,
    )
    with SourceWriter(directory, layout, shard_blocks=shard_blocks) as writer:
        for first in range(0, len(packed.rows), rows_per_block):
            rows = packed.rows[first : first + rows_per_block]
            sides = [_side(rows, 0, rows_per_block, source), _side(rows, 1, rows_per_block, target)]
            documents = [Provenance(f"pair-{p[1]}", "made.jsonl", 1) for row in rows for p in row]
            tokens = [sum(len(pair[side]) for row in rows for pair in row) for side in (0, 1)]
            writer.add(
                [*sides[0], *sides[1]],
                encode_provenance(documents),
                BlockCounts(len(documents), tokens[1], tokens[0], sum(tokens)),
            )
        writer.close()
    return packed


def _side(rows: list[Any], side: int, rows_per_block: int, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    ids, ends = np.full(rows_per_block * capacity, PAD), []
    for number, row in enumerate(rows):
        at = number * capacity
        for pair in row:
            ids[at : at + len(pair[side])] = pair[side]
            at += len(pair[side])
            ends.append(at)
    return ids, np.array(ends, dtype=np.int64)


def run_config(tokenizer: Path, sources: dict[str, Any], **changes: Any) -> RunConfig:
    """A config that reads `sources` (name -> path, or (path, weight)); `changes` by dotted name with __."""
    named = {
        name: {"path": str(v)} if isinstance(v, str | Path) else {"path": str(v[0]), "weight": v[1]}
        for name, v in sources.items()
    }
    body: dict[str, Any] = {
        "name": "test",
        "seed": 7,
        "tokenizer": str(tokenizer),
        "data": {"sources": named, "lanes": 2, "window_blocks": 2},
        "model": {
            "family": "decoder", "vocabulary_size": VOCABULARY, "width": 8, "num_heads": 2,
            "feed_forward_width": 8, "num_layers": 1,
        },
        "batch": {"global_batch_size": 8, "micro_batch_size": 2, "sequence_length": 16},
        "optimizer": {"kind": "sgd", "learning_rate": 0.1},
        "schedule": {"kind": "constant", "total_steps": 10},
        "checkpoint": {"every_steps": 5},
    }  # fmt: skip
    for dotted, value in changes.items():
        at = body
        *path, last = dotted.split("__")
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return RunConfig.model_validate(body)


PAIR_CHANGES: dict[str, Any] = {
    "objective__kind": "seq2seq",
    "batch__source_length": 24,
    "model": {
        "family": "encoder_decoder", "vocabulary_size": VOCABULARY, "width": 8, "num_heads": 2,
        "feed_forward_width": 8, "num_encoder_layers": 1, "num_decoder_layers": 1,
    },
}  # fmt: skip


class MemoryStore(Store):
    """A source held in memory, so that a test can damage any byte of it without touching a disk."""

    def __init__(self, files: dict[str, bytes], *, remote: bool = False) -> None:
        self.url = "memory://source"
        self.files, self.remote = dict(files), remote
        self.reads: list[tuple[str, int, int]] = []

    @classmethod
    def of(cls, directory: Path, **options: Any) -> MemoryStore:
        return cls({path.name: path.read_bytes() for path in sorted(directory.iterdir())}, **options)

    def get(self, key: str) -> bytes:
        if key not in self.files:
            raise NotFoundError(f"{key} does not exist.")
        return self.files[key]

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.reads.append((key, start, length))
        data = self.get(key)[start : start + length]
        if len(data) != length:
            raise StoreError(f"{key} ends early.")
        return data

    def size(self, key: str) -> int:
        return len(self.get(key))

    def local_path(self, key: str) -> Path | None:
        return None if self.remote else Path("/nowhere") / key
