"""Reading: tokens/s of our loader against webdataset, a memory map, and the peers that read packed rows; also resuming,
from S3, and with many shards.

Each side gives micro-batches of 8 rows of 1,024 tokens with document edges, positions and labels (`plain_batch`) from
the page cache, in one process; a step of ours has eight of them, and one in readings of its own. webdataset and the
memory map shuffle documents, concatenate and cut them, as ours does when it builds. Ours also checks every block's
crc32, counts targets, and makes a digest.
"""

from __future__ import annotations

import itertools
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import webdataset

from benchmarks.corpus import VOCABULARY, Corpus, make_corpus
from benchmarks.loader_growth import measure_growth
from benchmarks.loader_s3 import measure_s3
from benchmarks.plain_batch import LENGTH, ROWS, TOKENS, Chunker
from benchmarks.result import Result, interleave, median, median_ratio, timed
from pretrain.config.schema import RunConfig
from pretrain.data.blocks import BlockReader
from pretrain.data.format import INDEX_SUFFIX, MANIFEST_NAME, read_manifest
from pretrain.data.loader import Loader, open_loader
from pretrain.data.order import RowOrder, SourceShape
from pretrain.data.segments import order_of
from pretrain.data.stages import Plan, Stage, plan_run
from pretrain.data.state import DataState, Segment, SegmentSource
from pretrain.store import open_store
from pretrain.topology import World

Batches = Generator[object, None, None]
PEERS_PYTHON = Path(__file__).resolve().parent.parent / ".venv-bench" / "bin" / "python"
PEERS = ("streaming", "datasets", "litdata")
MANY_SHARDS = 100_000
MANY_BLOCKS = 1_000_000
STEP_ROWS = 8 * ROWS  # 65,536 tokens, a rank's part of a step of half a million on eight
WARM_UP = 32  # micro-batches; the blocks of the first ones are read in one go


class Size(NamedTuple):
    """How much is measured: seconds of each reading, its repetitions, tokens of a corpus, steps from S3."""

    seconds: float
    repetitions: int
    tokens: int
    s3_steps: int


def loader_config(corpus: Corpus, step_rows: int = ROWS) -> RunConfig:
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
            "batch": {"global_batch_size": step_rows, "micro_batch_size": ROWS, "sequence_length": LENGTH},
            "optimizer": {"kind": "adamw", "learning_rate": 1e-3},
            "schedule": {"kind": "constant", "total_steps": 10**6},
            "checkpoint": {"every_steps": 1000},
        }
    )


def open_ours(corpus: Corpus, step_rows: int = ROWS) -> Loader:
    return open_loader(loader_config(corpus, step_rows), None, World(), tokenizer_sha256="0" * 64)


def ours(corpus: Corpus, step_rows: int = STEP_ROWS) -> Batches:
    loader = open_ours(corpus, step_rows)
    state = loader.initial_state()
    step = 0
    try:
        while True:
            yield from loader.read(step, state).batches
            step, state = step + 1, loader.next_state(state)
    finally:
        loader.close()


def through_webdataset(corpus: Corpus) -> Batches:
    dataset = webdataset.WebDataset(
        [str(corpus.tar)], shardshuffle=False, nodesplitter=webdataset.split_by_node, empty_check=False
    )
    chunker = Chunker()
    while True:
        for sample in dataset.shuffle(1000, seed=1):
            batch = chunker.add(np.frombuffer(sample["u2"], dtype="<u2"))
            while batch is not None:
                yield batch
                batch = chunker.more()


def through_memory_map(corpus: Corpus) -> Batches:
    flat = np.frombuffer(np.memmap(corpus.flat, dtype="<u2", mode="r"), dtype="<u2")
    starts = corpus.starts
    generator = np.random.default_rng(1)
    chunker = Chunker()
    while True:
        for document in generator.permutation(starts.size - 1):
            batch = chunker.add(flat[starts[document] : starts[document + 1]])
            while batch is not None:
                yield batch
                batch = chunker.more()


def tokens_per_s(
    read: Callable[[Corpus], Batches], corpus: Corpus, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Tokens per second of the clock after the first micro-batches, for about `seconds`."""
    batches = read(corpus)
    for _ in range(WARM_UP):
        next(batches)
    count, start = 0, clock()
    while (elapsed := clock() - start) < seconds:
        next(batches)
        count += 1
    batches.close()
    return count * TOKENS / elapsed


def resume_s(corpus: Corpus, fraction: float, times: int = 1) -> float:
    """From a closed source to the first micro-batch at this fraction of an epoch of so many times the corpus."""
    step = int(fraction * times * corpus.ids.size / TOKENS)
    start = time.perf_counter()
    loader = open_ours(corpus)
    state = loader.resume(loader.initial_state().advance(step * ROWS))
    loader.read(step, state)
    elapsed = time.perf_counter() - start
    loader.close()
    return elapsed


def plan_many_shards_s(corpus: Corpus, folder: Path) -> float:
    """From a directory of 10^5 shards (sparse files) to the order of its rows: manifest, sizes, first addresses."""
    manifest = read_manifest(open_store(str(corpus.blocks)))
    shard = manifest.shards[0]
    shards = tuple(shard._replace(name=f"{number:06d}.tar") for number in range(MANY_SHARDS))
    folder.mkdir()
    counts = {name: MANY_SHARDS * getattr(shard, name) for name in ("blocks", "documents", "tokens")}
    (folder / MANIFEST_NAME).write_bytes(replace(manifest, shards=shards, **counts).to_json())
    index_bytes = (corpus.blocks / (shard.name + INDEX_SUFFIX)).stat().st_size
    for entry in shards:
        for name, size in ((entry.name, entry.bytes), (entry.name + INDEX_SUFFIX, index_bytes)):
            with (folder / name).open("wb") as file:
                file.truncate(size)

    def start() -> None:
        store = open_store(str(folder))
        reader = BlockReader(store, read_manifest(store))
        rows = reader.manifest.rows_per_block_at(LENGTH)
        RowOrder([SourceShape("many", reader.manifest.blocks, rows)], 1, 8, 2).locate_range(0, ROWS)

    return median([timed(start) for _ in range(3)])


def plan_many_blocks_s() -> float:
    """A run with stages and a cap over two sources of 10^6 blocks, 10^12 tokens each at 2^20, to its last addresses."""

    def start() -> None:
        sources = tuple(SegmentSource(name, name, 1.0, MANY_BLOCKS, 1024) for name in ("a", "b"))
        base = Segment(0, 512, 8, 64, 2, 1024, 1024, None, sources)
        stages = (Stage((("a", 3.0), ("b", 1.0)), step=100), Stage(tokens=2**40, global_batch_size=1024))
        plan = Plan(base, stages, (("a", 1.5),), total_steps=6 * MANY_BLOCKS)
        state = plan_run(plan, DataState(0, next(seeds), ()))
        order_of(state.segments, state.seed).locate_range(state.segments[-1].first_row, 512)

    seeds = itertools.count()  # another one each time: orders are remembered
    return median([timed(start) for _ in range(3)])


def peer_tokens_per_s(peer: str, corpus: Corpus, folder: Path, seconds: float, per: str = "s") -> float:
    """Of a peer in its own environment, per `s` or per `cpu_s`. Raises CalledProcessError with what it said."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [str(PEERS_PYTHON), str(Path(__file__).with_name("loader_peers.py")), peer, str(corpus.flat)]
        done = subprocess.run(
            [*command, f"{scratch}/rows", str(seconds)], stdout=subprocess.PIPE, text=True, check=True
        )
    return float(done.stdout.split(f"tokens_per_{per} ")[1].split()[0])


def measure_peers(corpus: Corpus, folder: Path, seconds: float, repetitions: int, command: str) -> list[Result]:
    """Ours against the readers of packed rows; says which are left out, and why."""
    if not PEERS_PYTHON.exists():
        print(f"left out: {', '.join(PEERS)} (no {PEERS_PYTHON}; make a venv there, with benchmarks/peers.txt)")
        return []
    results = []
    for suffix, clock, per in (("", time.perf_counter, "s"), ("_cpu", time.process_time, "cpu_s")):
        sides: dict[str, Callable[[], float]] = {"ours": partial(tokens_per_s, ours, corpus, seconds, clock)}
        sides |= {peer: partial(peer_tokens_per_s, peer, corpus, folder, seconds, per) for peer in PEERS}
        values = interleave(sides, repetitions)
        for peer in PEERS:
            ratio, theirs = median_ratio(values["ours"], values[peer]), median(values[peer])
            unit = f"{peer}, tokens/{per.replace('_', ' ')}"
            results.append(Result(f"loader.vs_{peer}{suffix}", ratio, "ratio", unit, theirs, repetitions, command))
    return results


def _prose(folder: Path, size: Size, command: str) -> list[Result]:
    return measure_kind("prose", _corpus(folder, "prose", size), size.seconds, size.repetitions, command)


def _code(folder: Path, size: Size, command: str) -> list[Result]:
    return measure_kind("code", _corpus(folder, "code", size), size.seconds, size.repetitions, command)


def _starts(folder: Path, size: Size, command: str) -> list[Result]:
    """Resuming at the end and at the beginning, and with many shards and blocks."""
    prose, times = _corpus(folder, "prose", size), 2 * size.repetitions
    results = []
    for metric, fraction in (("loader.resume_s", 0.9), ("loader.resume_at_start_s", 0.0)):
        seconds = median([resume_s(prose, fraction) for _ in range(times)])
        results.append(Result(metric, seconds, "s", "", None, times, command))
    many_s = plan_many_shards_s(prose, folder / "many")
    results.append(Result("loader.plan_1e5_shards_s", many_s, "s", "", None, 3, command))
    results.append(Result("loader.plan_1e6_blocks_s", plan_many_blocks_s(), "s", "", None, 3, command))
    return results


def _growth(folder: Path, size: Size, command: str) -> list[Result]:
    rate = partial(tokens_per_s, ours, seconds=size.seconds)
    prose = _corpus(folder, "prose", size)
    return measure_growth(prose, folder, rate, lambda c, n: resume_s(c, 0.9, n), size.repetitions, command)


def _s3(folder: Path, size: Size, command: str) -> list[Result]:
    return measure_s3(_corpus(folder, "prose", size), folder / "s3", open_ours, size.s3_steps, command)


def _peers(folder: Path, size: Size, command: str) -> list[Result]:
    prose = _corpus(folder, "prose", size)
    return measure_peers(prose, folder, size.seconds, max(1, size.repetitions - 2), command)


def _corpus(folder: Path, kind: str, size: Size) -> Corpus:
    return make_corpus(folder / kind, kind, size.tokens)


PARTS = {"prose": _prose, "code": _code, "starts": _starts, "growth": _growth, "s3": _s3, "peers": _peers}


def measure_part(part: str, *, quick: bool, command: str) -> list[Result]:
    """Ratios on short or long documents with tokens/s of ours; times to start; growth; from S3; against peers."""
    with tempfile.TemporaryDirectory() as name:
        return PARTS[part](Path(name), Size(0.3, 3, 2**20, 60) if quick else Size(1.0, 5, 2**23, 200), command)


def measure(*, quick: bool, command: str) -> list[Result]:
    """All parts, one after the other."""
    return [result for part in PARTS for result in measure_part(part, quick=quick, command=command)]


def measure_kind(kind: str, corpus: Corpus, seconds: float, repetitions: int, command: str) -> list[Result]:
    """Ours against webdataset and a memory map on documents of one kind, by wall clock and by CPU time."""
    ours_by = {"": ours, "_one_a_step": partial(ours, step_rows=ROWS)}
    readers: dict[str, Callable[[Corpus], Batches]] = {
        **ours_by, "webdataset": through_webdataset, "memory map": through_memory_map
    }  # fmt: skip
    prefix = "loader." if kind == "prose" else f"loader.{kind}_"
    results = []
    for suffix, clock in (("", time.perf_counter), ("_cpu", time.process_time)):
        sides = {name: partial(tokens_per_s, read, corpus, seconds, clock) for name, read in readers.items()}
        values = interleave(sides, repetitions)
        for steps in ours_by:
            for metric, peer in (
                (f"loader.{kind}_vs_webdataset", "webdataset"),
                (f"{prefix}vs_mmap", "memory map"),
            ):
                ratio = median_ratio(values[steps], values[peer])
                unit, theirs = f"{peer}, tokens/{'CPU ' if suffix else ''}s", median(values[peer])
                results.append(Result(metric + steps + suffix, ratio, "ratio", unit, theirs, repetitions, command))
        ours_per_s = median(values[""])
        results.append(Result(f"{prefix}tokens_per_s{suffix}", ours_per_s, "tokens/s", "", None, repetitions, command))
    return results
