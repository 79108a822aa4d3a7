"""Made-up documents of tokens, written in the three forms that the loader benchmark reads.

`blocks`: our source. `tar`: a webdataset shard with a member per document. `flat`: one file of ids and
the document offsets, for a memory map. Lengths are those of short prose (99 tokens on average) and of
source code (4,057), log-normal, from a fixed seed.
"""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pretrain.data.format import Manifest, Provenance, encode_provenance
from pretrain.data.shard_writer import BlockCounts, SourceWriter

VOCABULARY, END = 32768, 0
BLOCK_TOKENS, BLOCKS_PER_SHARD = 65536, 16
MEAN_TOKENS = {"prose": 99, "code": 4057}


@dataclass(frozen=True, slots=True)
class Corpus:
    """One set of documents: all ids, each document's end included, and where each begins (plus the total)."""

    ids: np.ndarray
    starts: np.ndarray
    blocks: Path
    tar: Path
    flat: Path


def make_corpus(folder: Path, kind: str, tokens: int) -> Corpus:
    """Writes `tokens` tokens of documents of one kind, rounded down to whole blocks."""
    generator = np.random.default_rng(0)
    mean = MEAN_TOKENS[kind]
    lengths = generator.lognormal(np.log(mean) - 0.5, 1.0, size=2 * tokens // mean + 16).astype(np.int64) + 2
    starts = np.concatenate(([0], np.cumsum(lengths)))
    total = tokens // BLOCK_TOKENS * BLOCK_TOKENS
    starts = np.append(starts[starts < total], total)
    ids = generator.integers(3, VOCABULARY, size=total).astype("<u2")
    ids[starts[1:] - 1] = END
    folder.mkdir(parents=True)
    corpus = Corpus(ids, starts, folder / "blocks", folder / "documents.tar", folder / "flat.bin")
    _write_blocks(corpus, kind)
    _write_tar(corpus)
    corpus.flat.write_bytes(ids.tobytes())
    return corpus


def _write_blocks(corpus: Corpus, kind: str) -> None:
    header = Manifest(
        name=kind,
        kind="tokens",
        tokenizer_sha256="0" * 64,
        vocabulary_size=VOCABULARY,
        dtype="u2",
        eos_id=END,
        pad_id=1,
        start_id=2,
        block_tokens=BLOCK_TOKENS,
    )
    following = np.append(corpus.ids, np.uint16(END))
    provenance = encode_provenance([Provenance("made-up", "made-up", 0)])
    with SourceWriter(corpus.blocks, header, shard_blocks=BLOCKS_PER_SHARD) as writer:
        for start in range(0, corpus.ids.size, BLOCK_TOKENS):
            ends = corpus.starts[(corpus.starts > start) & (corpus.starts <= start + BLOCK_TOKENS)] - start
            counts = BlockCounts(documents=ends.size, tokens=BLOCK_TOKENS, source_tokens=0, text_bytes=4 * BLOCK_TOKENS)
            writer.add([following[start : start + BLOCK_TOKENS + 1], ends.astype("<u4")], provenance, counts)
        writer.close()


def _write_tar(corpus: Corpus) -> None:
    with tarfile.open(corpus.tar, "w") as archive:
        for number, (start, end) in enumerate(zip(corpus.starts, corpus.starts[1:], strict=False)):
            data = corpus.ids[start:end].tobytes()
            member = tarfile.TarInfo(f"{number:08d}.u2")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
