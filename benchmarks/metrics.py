"""What measuring costs a step of the quickstart's model: a logged step, and one that also looks at every layer.

One process, CPU time (so that other work on the machine does not count). What a logged step adds is timed where it is
added: opening the watch, the tables, the gathering over ranks, the record on disk. What looking at the layers adds is
the difference of whole steps, in turn. Part `trackers` is in the module of that name.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from benchmarks import trackers
from benchmarks.bare_loop import Shape
from benchmarks.machine import precision
from benchmarks.result import Result, interleave, median
from benchmarks.step import ACCUMULATION, LENGTH, ROWS, batch_of, build_engine, run_config
from pretrain.engine.distributed import start_process_group, stop_process_group
from pretrain.metrics import JsonlSink
from pretrain.store import open_store
from pretrain.topology import World
from pretrain.train.layer_watch import LayerWatch
from pretrain.train.own_work import OwnWork
from pretrain.train.step_times import StepTimes
from pretrain.train.step_watch import StepWatch

SHAPE = Shape(vocabulary_size=8192, width=256, num_layers=6, num_heads=4, num_kv_heads=2, feed_forward_width=704)
EVERY = 100  # the default of metrics.layers_every_steps


class _OneSource:
    """What a watch asks of the loader."""

    source_names = ("text",)

    def row_sources(self, state: Any, index: int) -> Any:
        return np.zeros(ROWS, dtype=np.int64)

    def shares(self, after: Any) -> dict[str, dict[str, float]]:
        return {"text": {"share": 1.0, "planned_share": 1.0, "epochs": 0.1}}


class _Steps:
    """Steps of one engine, with and without a look at them."""

    def __init__(self, folder: str) -> None:
        config = run_config(SHAPE, zero_stage=2, precision=precision(), microsteps=ACCUMULATION)
        self.config, self.engine = config, build_engine(config)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(SHAPE.vocabulary_size, (ACCUMULATION, ROWS, LENGTH + 1), generator=generator)
        self.batches = [batch_of(index, part) for index, part in enumerate(ids)]
        self.times = StepTimes(self.engine, OwnWork(lambda: self.engine.forward_s), torch.device("cpu"))
        self.sink = JsonlSink(open_store(folder), "metrics/attempt-001.jsonl")
        self.logging_s: list[float] = []

    def plain(self) -> float:
        return self._step(None)

    def logged(self) -> float:
        started = time.process_time()
        watch = StepWatch(self.config, _OneSource(), None, None)  # type: ignore[arg-type]
        opening_s = time.process_time() - started
        total_s = self._step(watch)
        started = time.process_time()
        record = {"t": time.time(), "step": len(self.logging_s), "loss": 2.0, **self.times.gather(1.0)}
        self.sink.write(record | watch.tables(None))  # type: ignore[arg-type]
        self.logging_s.append(opening_s + time.process_time() - started)
        return total_s

    def with_layers(self) -> float:
        started = time.process_time()
        watch = StepWatch(self.config, _OneSource(), None, LayerWatch(self.engine, attention=True))  # type: ignore[arg-type]
        self._step(watch)
        watch.tables(None)  # type: ignore[arg-type]
        return time.process_time() - started

    def _step(self, watch: StepWatch | None) -> float:
        started = time.process_time()
        for batch in self.batches:
            watching = watch.forward(batch) if watch else nullcontext()
            self.engine.micro_step(batch, global_target_tokens=2048, watching=watching)
        self.engine.step(1e-3)
        if watch:
            watch.after_step()
        self.times.finish_step(2048)
        return time.process_time() - started


PARTS = {"step": "what a step pays for", "trackers": "steps beside servers in trouble"}


def measure_part(part: str, *, quick: bool, command: str) -> list[Result]:
    return (trackers.measure if part == "trackers" else measure)(quick=quick, command=command)


def measure(*, quick: bool, command: str) -> list[Result]:
    """Fractions of a plain step."""
    repetitions = 3 if quick else 9
    torch.set_num_threads(1)
    start_process_group(World(), torch.device("cpu"), timeout_s=60.0)
    with tempfile.TemporaryDirectory() as folder:
        steps = _Steps(folder)
        steps.plain()
        sides = {"plain": steps.plain, "logged": steps.logged, "layers": steps.with_layers}
        found = interleave(sides, repetitions)
        steps.engine.close()
    stop_process_group()
    plain_s = median(found["plain"])
    logging, layers = median(steps.logging_s) / plain_s, median(found["layers"]) / plain_s - 1
    baseline = f"a step of the quickstart's model, {precision()}, s of CPU"
    values = {
        "metrics.logged_step_cost": logging,
        "metrics.layers_step_cost": layers,
        "metrics.cost": logging + layers / EVERY,
    }
    return [Result(name, value, "ratio", baseline, plain_s, repetitions, command) for name, value in values.items()]
