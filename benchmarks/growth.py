"""How time grows with size: exponents of time over ranks, shards, parameters and checkpoints.

An exponent is the slope of log time over log size by least squares over a range of 16 or more: 0 does not grow, 1 grows
in proportion. Each size is timed several times, the fastest counts: the rest is the machine's other work.

ranks: the controller places so many on nodes of eight. shards: the order is opened and a step's rows are found in a
source of so many. parameters: one save of so many, to disk. checkpoints: so many are listed, the newest good one found.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.result import Result
from launch.controller.attempt import assign_ranks, choose_nodes
from pretrain.checkpoint import save
from pretrain.checkpoint.listing import list_checkpoints
from pretrain.data.order import RowOrder, SourceShape
from pretrain.engine.distributed import start_process_group, stop_process_group
from pretrain.engine.state import Fragment, OptimizerSpec
from pretrain.store import open_store
from pretrain.topology import World

RANKS = (64, 256, 1024, 4096)
SHARDS = (100, 1_000, 10_000, 100_000)
PARAMETERS = (2**19, 2**21, 2**23, 2**25)
CHECKPOINTS = (4, 16, 64, 256)
BLOCKS_PER_SHARD, ROWS_PER_BLOCK, ROWS_PER_STEP = 64, 16, 1024

Times = tuple[tuple[int, ...], list[float]]


def exponent(sizes: Sequence[float], times: Sequence[float]) -> float:
    """Slope of log time over log size."""
    xs, ys = [math.log(size) for size in sizes], [math.log(value) for value in times]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - mean_x) ** 2 for x in xs)


def fastest(action: Callable[[], object], repetitions: int) -> float:
    """Seconds of the fastest of several calls."""
    best = math.inf
    for _ in range(repetitions):
        started = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - started)
    return best


def measure(*, quick: bool, command: str) -> list[Result]:
    """One exponent per kind of size."""
    repetitions = 3 if quick else 9
    sizes_of_saves = PARAMETERS[:3] if quick else PARAMETERS
    with tempfile.TemporaryDirectory() as name:
        sides = {
            "ranks": _over_ranks(repetitions),
            "shards": _over_shards(repetitions),
            "parameters": _over_parameters(Path(name), repetitions, sizes_of_saves),
            "checkpoints": _over_checkpoints(Path(name), repetitions),
        }
    return [
        Result(f"growth.{kind}", exponent(sizes, times), "exponent", f"{sizes[0]}, s", times[0], repetitions, command)
        for kind, (sizes, times) in sides.items()
    ]


def _over_ranks(repetitions: int) -> Times:
    def place(ranks: int) -> None:
        chosen = choose_nodes({f"node-{number}": 8 for number in range(ranks // 8)}, ranks)
        assign_ranks(dict(enumerate(chosen.values())), ranks)

    return RANKS, [fastest(lambda ranks=ranks: place(ranks), repetitions) for ranks in RANKS]


def _over_shards(repetitions: int) -> Times:
    def plan(shards: int) -> None:
        shape = SourceShape("text", shards * BLOCKS_PER_SHARD, ROWS_PER_BLOCK)
        order = RowOrder([shape], seed=1, lanes=8, window_blocks=2)
        order.locate_range(shape.num_rows // 2, ROWS_PER_STEP)

    return SHARDS, [fastest(lambda shards=shards: plan(shards), repetitions) for shards in SHARDS]


class _State:
    """What `save` asks of an engine, for one tensor of so many parameters and its two moments."""

    def __init__(self, parameters: int) -> None:
        keys = ("master", "exp_avg", "exp_avg_sq")
        self._tensors = {key: torch.full((parameters,), 0.5) for key in keys}
        self._shape = (parameters,)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": self._shape}

    def optimizer_spec(self) -> OptimizerSpec:
        return OptimizerSpec("AdamW", ("exp_avg", "exp_avg_sq"), ("step",))

    def optimizer_scalars(self) -> dict[str, dict[str, float]]:
        return {"decayed": {"step": 1.0}}

    def hyperparameters(self) -> dict[str, dict[str, Any]]:
        return {"decayed": {"lr": 1e-3}}

    def fragments(self) -> list[Fragment]:
        return [Fragment("weight", self._shape, 0, self._tensors)]


def _save(state: _State, folder: Path, step: int) -> None:
    handle = save(open_store(folder), state, step=step, attempt=1, training_state={}, world=World(), guard=lambda: None)
    handle.wait()


def _over_parameters(folder: Path, repetitions: int, sizes: Sequence[int]) -> Times:
    times = []
    start_process_group(World(), torch.device("cpu"), 60.0)
    try:
        for size in sizes:
            state, numbers = _State(size), iter(range(1, 1000))
            _save(state, folder / f"parameters-{size}", next(numbers))  # touches the buffers
            where = folder / f"parameters-{size}"
            times.append(
                fastest(
                    lambda state=state, numbers=numbers, where=where: _save(state, where, next(numbers)),
                    min(repetitions, 4),
                )
            )
    finally:
        stop_process_group()
    return tuple(sizes), times


def _over_checkpoints(folder: Path, repetitions: int) -> Times:
    start_process_group(World(), torch.device("cpu"), 60.0)
    try:
        state = _State(16)
        for count in CHECKPOINTS:
            for step in range(count):
                _save(state, folder / f"checkpoints-{count}", step)
    finally:
        stop_process_group()

    def find(count: int) -> None:
        found = list_checkpoints(open_store(folder / f"checkpoints-{count}"))
        assert next(info.step for info in found if info.problem is None) == count - 1

    return CHECKPOINTS, [fastest(lambda count=count: find(count), repetitions) for count in CHECKPOINTS]
