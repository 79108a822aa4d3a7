"""mosaicml-streaming, Hugging Face datasets and litdata on rows that were packed beforehand, one process each.

`python benchmarks/loader_peers.py PEER FLAT.bin FOLDER SECONDS` in an environment that has them (a venv of its own,
.venv-bench, filled by `pip install -r benchmarks/peers.txt`) prints tokens per CPU second and per second. Rows are
shuffled, read without worker processes, and handed over as `plain_batch` does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.plain_batch import LENGTH, ROWS, TOKENS, PlainBatch, packed_rows

END = 0


def rows_of(flat: Path) -> np.ndarray:
    """[n, S + 1]: each row and the token behind it."""
    ids = np.fromfile(flat, dtype="<u2")
    count = (ids.size - 1) // LENGTH
    return np.stack([ids[row * LENGTH : row * LENGTH + LENGTH + 1] for row in range(count)])


def streaming(rows: np.ndarray, folder: Path) -> Iterator[PlainBatch]:
    from streaming import MDSWriter, StreamingDataset

    with MDSWriter(out=str(folder), columns={"ids": f"ndarray:uint16:{LENGTH + 1}"}) as writer:
        for row in rows:
            writer.write({"ids": row})
    dataset = StreamingDataset(local=str(folder), shuffle=True, shuffle_seed=1, batch_size=ROWS)
    while True:
        yield from _batched(sample["ids"] for sample in dataset)


def datasets(rows: np.ndarray, folder: Path) -> Iterator[PlainBatch]:
    from datasets import Dataset, load_from_disk

    Dataset.from_dict({"ids": rows}).save_to_disk(str(folder))
    dataset = load_from_disk(str(folder)).with_format("numpy")
    generator = np.random.default_rng(1)
    while True:
        order = generator.permutation(len(dataset))
        for first in range(0, len(order) - ROWS + 1, ROWS):
            yield packed_rows(np.asarray(dataset[order[first : first + ROWS]]["ids"]), END)


def litdata(rows: np.ndarray, folder: Path) -> Iterator[PlainBatch]:
    import torch
    from litdata import StreamingDataset, TokensLoader
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_bytes="16MB", item_loader=TokensLoader(block_size=LENGTH + 1))
    for number, row in enumerate(rows):
        writer[number] = (torch.from_numpy(row.astype(np.int32)),)
    writer.done()
    writer.merge()
    dataset = StreamingDataset(str(folder), item_loader=TokensLoader(block_size=LENGTH + 1), shuffle=True, seed=1)
    while True:
        yield from _batched(sample.numpy() for sample in dataset)


def _batched(samples: Iterator[np.ndarray]) -> Iterator[PlainBatch]:
    kept: list[np.ndarray] = []
    for sample in samples:
        kept.append(sample)
        if len(kept) == ROWS:
            yield packed_rows(np.stack(kept), END)
            kept = []


def main() -> None:
    peer, flat, folder, seconds = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])
    batches = {"streaming": streaming, "datasets": datasets, "litdata": litdata}[peer](rows_of(flat), folder)
    next(batches)
    count, start, cpu_start = 0, time.perf_counter(), time.process_time()
    while (elapsed := time.perf_counter() - start) < seconds:
        next(batches)
        count += 1
    print(f"tokens_per_cpu_s {count * TOKENS / (time.process_time() - cpu_start)}")
    print(f"tokens_per_s {count * TOKENS / elapsed}")


if __name__ == "__main__":
    main()
