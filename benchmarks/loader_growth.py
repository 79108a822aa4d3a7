"""Reading at 10 and 100 times the shards: the same blocks again and again, under other names and numbers.

The tars are links to the corpus's own, so that what grows is what a large source has more of: entries of the manifest,
files, indexes, blocks to permute.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.corpus import Corpus
from benchmarks.result import Result, interleave, median, median_ratio
from pretrain.data.format import INDEX_SUFFIX, MANIFEST_NAME, read_manifest
from pretrain.store import open_store

TIMES = (10, 100)


def multiplied(corpus: Corpus, times: int, folder: Path) -> Corpus:
    """The corpus with `times` as many shards, written to `folder`; ids and document starts stay those of one."""
    folder.mkdir()
    manifest = read_manifest(open_store(str(corpus.blocks)))
    columns = 2 + 3 * len(manifest.members)
    shards = []
    for copy in range(times):
        for shard in manifest.shards:
            name = f"{len(shards):06d}.tar"
            os.link(corpus.blocks / shard.name, folder / name)
            table = np.fromfile(corpus.blocks / (shard.name + INDEX_SUFFIX), dtype="<i8").reshape(-1, columns)
            table[:, 0] += copy * manifest.blocks
            (folder / (name + INDEX_SUFFIX)).write_bytes(table.tobytes())
            digest = hashlib.sha256(table.tobytes()).hexdigest()
            shards.append(shard._replace(name=name, index_sha256=digest))
    counts = {name: times * getattr(manifest, name) for name in ("blocks", "documents", "tokens", "text_bytes")}
    (folder / MANIFEST_NAME).write_bytes(replace(manifest, shards=tuple(shards), **counts).to_json())
    return replace(corpus, blocks=folder)


def measure_growth(
    corpus: Corpus,
    folder: Path,
    rate: Callable[[Corpus], float],
    resume: Callable[[Corpus, int], float],
    repetitions: int,
    command: str,
) -> list[Result]:
    """Tokens/s and the time to resume at 90 % of the epoch, against those with the corpus's own shards.

    Args:
        rate: tokens/s of a corpus.
        resume: seconds to the first micro-batch at 90 % of an epoch of so many times the corpus.
    """
    sizes = {1: corpus} | {times: multiplied(corpus, times, folder / f"times-{times}") for times in TIMES}
    rates = interleave({str(times): lambda times=times: rate(sizes[times]) for times in sizes}, repetitions)
    starts = interleave({str(times): lambda times=times: resume(sizes[times], times) for times in sizes}, repetitions)
    results = []
    for times in TIMES:
        ratio = median_ratio(rates[str(times)], rates["1"])
        results.append(
            Result(
                f"loader.tokens_per_s_at_{times}x_shards",
                ratio,
                "ratio",
                "at 1x, tokens/s",
                median(rates["1"]),
                repetitions,
                command,
            )
        )
        results.append(
            Result(
                f"loader.resume_at_{times}x_shards_s",
                median(starts[str(times)]),
                "s",
                "at 1x, s",
                median(starts["1"]),
                repetitions,
                command,
            )
        )
    return results
