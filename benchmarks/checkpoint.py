"""Saving: what it costs the loop and how fast the bytes reach the disk, ZeRO-1 in bf16, one rank.

The stall is what `save()` keeps the loop waiting. Its baselines are a copy of the same bytes in memory
(the least that any saver needs) and DeepSpeed's own `save_checkpoint`; the bandwidth's baseline is a
plain write with fsync of as many bytes to the same disk.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.bare_loop import Shape
from benchmarks.result import Result, interleave, median, median_ratio, timed
from benchmarks.step import build_engine, dense_batch, run_config
from pretrain.checkpoint import prepare_copy, save
from pretrain.engine.distributed import start_process_group, stop_process_group
from pretrain.engine.engine import Engine
from pretrain.store import open_store
from pretrain.topology import World

LARGE = Shape(vocabulary_size=32768, width=768, num_layers=11, num_heads=12, num_kv_heads=12, feed_forward_width=2048)
SMALL = Shape()


class Saver:
    """One engine that is saved again and again into a folder, each time under its own step."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder, self.step = engine, folder, 0
        self.state_bytes = sum(
            tensor.numel() * tensor.element_size()
            for fragment in engine.fragments()
            for tensor in fragment.tensors.values()
        )
        self.seconds_to_disk: list[float] = []
        thread = prepare_copy(engine)  # as a run does, long before its first save
        if thread:
            thread.join()
        self._source = np.ones(self.state_bytes // 4, dtype=np.float32)
        self._target = np.empty_like(self._source)
        self._target[:] = 0

    def ours(self) -> float:
        """Stall of one save in seconds; how long it took to be durable goes to `seconds_to_disk`."""
        self.step += 1
        start = time.perf_counter()
        handle = save(
            open_store(self.folder / "ours"),
            self.engine,
            step=self.step,
            attempt=1,
            training_state={},
            world=World(),
            guard=lambda: None,
        )
        stall = time.perf_counter() - start
        handle.wait()
        self.seconds_to_disk.append(time.perf_counter() - start)
        shutil.rmtree(self.folder / "ours")
        return stall

    def memory_copy(self) -> float:
        return timed(lambda: np.copyto(self._target, self._source))

    def deepspeed(self) -> float:
        seconds = timed(lambda: self.engine.deepspeed_engine.save_checkpoint(str(self.folder / "deepspeed")))
        shutil.rmtree(self.folder / "deepspeed")
        return seconds

    def plain_write(self) -> float:
        path = self.folder / "plain"

        def write() -> None:
            with path.open("wb") as file:
                file.write(memoryview(self._source).cast("B"))
                os.fsync(file.fileno())

        seconds = timed(write)
        path.unlink()
        return seconds


def measure(*, quick: bool, command: str) -> list[Result]:
    """Ratios of stall and of bandwidth."""
    repetitions = 2 if quick else 5
    shape = SMALL if quick else LARGE
    start_process_group(World(), torch.device("cpu"), 60.0)
    try:
        engine = build_engine(run_config(shape, zero_stage=1))
        for index in range(engine.accumulation_steps):
            ids = torch.randint(shape.vocabulary_size, (4, 65))
            engine.micro_step(dense_batch(index, ids), global_target_tokens=1024)
        engine.step(1e-4)
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            saver = Saver(engine, Path(folder))
            times = interleave(
                {
                    "ours": saver.ours,
                    "copy": saver.memory_copy,
                    "deepspeed": saver.deepspeed,
                    "write": saver.plain_write,
                },
                repetitions,
            )
        engine.close()
    finally:
        stop_process_group()
    megabytes = saver.state_bytes / 1e6
    sides = (
        ("checkpoint.stall_vs_memcpy", times["ours"], times["copy"], "memory copy, s"),
        ("checkpoint.stall_vs_deepspeed", times["ours"], times["deepspeed"], "DeepSpeed, s"),
        ("checkpoint.bandwidth_vs_write", times["write"], saver.seconds_to_disk, "write + fsync, s"),
    )
    results = [
        Result(
            metric,
            median_ratio(above, below),
            "ratio",
            baseline,
            median(above if metric.startswith("checkpoint.bandwidth") else below),
            repetitions,
            command,
        )
        for metric, above, below, baseline in sides
    ]
    results.append(Result("checkpoint.stall_s", median(times["ours"]), "s", "", None, repetitions, command))
    results.append(Result("checkpoint.state_mb", megabytes, "MB", "", None, 1, command))
    return results
