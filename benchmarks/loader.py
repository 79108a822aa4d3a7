"""Reading: tokens/s of our loader against webdataset (a member per document) and a memory map.

Each side gives micro-batches of 8 rows of 1,024 tokens from the page cache. Ours also checks every
block's crc32, isolates the documents and counts targets; the others give plain rows.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import webdataset

from benchmarks.corpus import VOCABULARY, Corpus, make_corpus
from benchmarks.result import Result, interleave, median, median_ratio
from pretrain.config.schema import RunConfig
from pretrain.data.loader import Loader, open_loader
from pretrain.topology import World

Batches = Generator[torch.Tensor, None, None]
ROWS, LENGTH = 8, 1024
TOKENS = ROWS * LENGTH


def loader_config(corpus: Corpus) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "benchmark",
            "seed": 1,
            "tokenizer": "none",
            "data": {"sources": {"made-up": {"path": str(corpus.blocks)}}},
            "model": {
                "family": "decoder",
                "vocabulary_size": VOCABULARY,
                "width": 8,
                "num_layers": 1,
                "num_heads": 1,
                "feed_forward_width": 8,
            },
            "batch": {"global_batch_size": ROWS, "micro_batch_size": ROWS, "sequence_length": LENGTH},
            "optimizer": {"kind": "adamw", "learning_rate": 1e-3},
            "schedule": {"kind": "constant", "total_steps": 10**6},
            "checkpoint": {"every_steps": 1000},
        }
    )


def open_ours(corpus: Corpus) -> Loader:
    byte_lengths = np.full(VOCABULARY, 4, dtype=np.int32)
    return open_loader(loader_config(corpus), byte_lengths, World(), tokenizer_sha256="0" * 64)


def ours(corpus: Corpus) -> Batches:
    loader = open_ours(corpus)
    state = loader.initial_state()
    step = 0
    try:
        while True:
            yield loader.read(step, state).batches[0].decoder_ids
            step, state = step + 1, loader.next_state(state)
    finally:
        loader.close()


def through_webdataset(corpus: Corpus) -> Batches:
    dataset = webdataset.WebDataset(
        [str(corpus.tar)], shardshuffle=False, nodesplitter=webdataset.split_by_node, empty_check=False
    )
    left = np.empty(0, dtype="<u2")
    needed = ROWS * (LENGTH + 1)
    while True:
        parts, have = [left], left.size
        for sample in dataset.shuffle(1000, seed=1):
            parts.append(np.frombuffer(sample["u2"], dtype="<u2"))
            have += parts[-1].size
            if have >= needed:
                flat = np.concatenate(parts)
                yield torch.from_numpy(flat[:needed].astype(np.int64).reshape(ROWS, LENGTH + 1))
                parts, have = [flat[needed:]], flat.size - needed
        left = np.concatenate(parts)


def through_memory_map(corpus: Corpus) -> Batches:
    flat = np.memmap(corpus.flat, dtype="<u2", mode="r")
    generator = np.random.default_rng(1)
    needed = ROWS * (LENGTH + 1)
    parts, have = [], 0
    while True:
        for document in generator.permutation(corpus.starts.size - 1):
            parts.append(flat[corpus.starts[document] : corpus.starts[document + 1]])
            have += parts[-1].size
            if have >= needed:
                joined = np.concatenate(parts)
                yield torch.from_numpy(joined[:needed].astype(np.int64).reshape(ROWS, LENGTH + 1))
                parts, have = [joined[needed:]], joined.size - needed


def tokens_per_s(read: Callable[[Corpus], Batches], corpus: Corpus, seconds: float) -> float:
    """Tokens per second after the first micro-batch, for about `seconds`."""
    batches = read(corpus)
    next(batches)
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        next(batches)
        count += 1
    batches.close()
    return count * TOKENS / elapsed


def resume_s(corpus: Corpus) -> float:
    """From a closed source to the first micro-batch of a step far in the run."""
    start = time.perf_counter()
    loader = open_ours(corpus)
    state = loader.initial_state().advance(1000 * ROWS)
    loader.check(state)
    loader.read(1000, state)
    elapsed = time.perf_counter() - start
    loader.close()
    return elapsed


def measure(*, quick: bool, command: str) -> list[Result]:
    """Ratios on short and long documents, tokens/s of ours, and the time to resume."""
    seconds, repetitions, tokens = (0.3, 3, 2**20) if quick else (1.0, 5, 2**23)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        corpora = {kind: make_corpus(Path(folder) / kind, kind, tokens) for kind in ("prose", "code")}
        for kind, corpus in corpora.items():
            sides = {"ours": ours, "webdataset": through_webdataset, "memory map": through_memory_map}
            values = interleave(
                {name: partial(tokens_per_s, read, corpus, seconds) for name, read in sides.items()},
                repetitions,
            )
            for metric, peer in (
                (f"loader.{kind}_vs_webdataset", "webdataset"),
                ("loader.vs_mmap" if kind == "prose" else "loader.code_vs_mmap", "memory map"),
            ):
                ratio = median_ratio(values["ours"], values[peer])
                results.append(
                    Result(metric, ratio, "ratio", f"{peer}, tokens/s", median(values[peer]), repetitions, command)
                )
            name = "loader.tokens_per_s" if kind == "prose" else "loader.code_tokens_per_s"
            results.append(Result(name, median(values["ours"]), "tokens/s", "", None, repetitions, command))
        times = [resume_s(corpora["prose"]) for _ in range(repetitions)]
        results.append(Result("loader.resume_s", median(times), "s", "", None, repetitions, command))
    return results
