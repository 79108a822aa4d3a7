"""One slot's part of `pretrain doctor --slots N`: a matrix product and an all-reduce whose results are known.

`python -m launch.slot_probe` with the variables of a rank prints a JSON line. The matrices hold small whole numbers,
so every product is exact in fp32 whatever the order of its sums; a slot whose number differs computes wrong.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

WIDTH = 384
REPETITIONS = 12
REDUCED = 2**18  # elements of the all-reduce
TIMEOUT_S = 120.0


def expected_sum() -> int:
    """Sum of all elements of the product, from its factors' sums alone: sum over k of column sum times row sum."""
    import numpy as np

    left, right = _factors()
    return int((left.sum(axis=0, dtype=np.int64) * right.sum(axis=1, dtype=np.int64)).sum())


def _factors() -> tuple[Any, Any]:
    import numpy as np

    i, k = np.indices((WIDTH, WIDTH))
    return (7 * i + 3 * k) % 11 - 5, (5 * i + 2 * k) % 13 - 6


def run_probe(rank: int, size: int, master: tuple[str, int], device: str) -> dict[str, Any]:
    """Measures this slot; a collective of all slots.

    Returns:
        product: sum of the product's elements; matmul_s: the median time of one; reduced: the sum over ranks of
        rank + 1 as this rank got it; all_reduce_s: its time.
    """
    import statistics

    import torch
    import torch.distributed as dist

    place = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)
    left, right = (torch.tensor(factor, dtype=torch.float32, device=place) for factor in _factors())
    times, product = [], None
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        product = left @ right
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    assert product is not None
    backend = "nccl" if device == "cuda" else "gloo"
    store = dist.TCPStore(master[0], master[1], size, is_master=rank == 0, timeout=timedelta(seconds=TIMEOUT_S))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S))
    try:
        values = torch.full((REDUCED,), float(rank + 1), device=place)
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(values)
        seconds = time.perf_counter() - started
        reduced = sorted({int(value) for value in values.unique().tolist()})
    finally:
        dist.destroy_process_group()
    return {
        "rank": rank,
        "product": int(product.double().sum()),
        "matmul_s": statistics.median(times),
        "reduced": reduced,
        "all_reduce_s": seconds,
    }


def main() -> int:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    print(json.dumps(run_probe(rank, size, master, os.environ.get("PROBE_DEVICE", "cpu"))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
