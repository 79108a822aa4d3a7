"""Saving: what it costs the loop, how fast the bytes reach the disk, what memory it takes. ZeRO-1 in bf16, two ranks.

The stall is what `save()` keeps the loop waiting, of the slower rank. Its baselines are a copy of the same bytes
in memory by both ranks at once (the least that any saver needs) and DeepSpeed's own `save_checkpoint`; the
bandwidth's baseline is a plain write with fsync of as many bytes by both ranks at once to the same disk.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.bare_loop import Shape
from benchmarks.machine import precision
from benchmarks.ranks import run_in_ranks
from benchmarks.result import Result, interleave, median, median_ratio, timed
from benchmarks.step import batch_of, build_engine, run_config
from pretrain.checkpoint import prepare_copy, save
from pretrain.engine.distributed import barrier, gather_texts
from pretrain.engine.engine import Engine
from pretrain.store import open_store
from pretrain.topology import World

RANKS = 2
LARGE = Shape(vocabulary_size=32768, width=768, num_layers=11, num_heads=12, num_kv_heads=12, feed_forward_width=2048)
SMALL = Shape()
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Saver:
    """One rank's engine that is saved again and again into a folder, each time under its own step."""

    def __init__(self, engine: Engine, folder: Path, world: World) -> None:
        self.engine, self.folder, self.world, self.step = engine, folder, world, 0
        self.state_bytes = sum(
            tensor.numel() * tensor.element_size()
            for fragment in engine.fragments()
            for tensor in fragment.tensors.values()
        )
        self.seconds_to_disk: list[float] = []
        before = _resident_bytes()
        thread = prepare_copy(engine)  # as a run does, long before its first save
        if thread:
            thread.join()
        with _Peak() as peak:
            self.ours()
        self.extra_bytes = peak.bytes - before
        self.seconds_to_disk.clear()
        self._source = np.ones(self.state_bytes // 4, dtype=np.float32)
        self._target = np.empty_like(self._source)
        self._target[:] = 0

    def ours(self) -> float:
        """Stall of one save in seconds; how long it took to be durable goes to `seconds_to_disk`."""
        self.step += 1
        barrier()
        start = time.perf_counter()
        handle = save(
            open_store(self.folder / "ours"),
            self.engine,
            step=self.step,
            attempt=1,
            training_state={},
            world=self.world,
            guard=lambda: None,
        )
        stall = time.perf_counter() - start
        handle.wait()
        self.seconds_to_disk.append(_slowest(time.perf_counter() - start))
        self._remove("ours")
        return _slowest(stall)

    def memory_copy(self) -> float:
        return self._timed(lambda: np.copyto(self._target, self._source))

    def deepspeed(self) -> float:
        seconds = self._timed(lambda: self.engine.deepspeed_engine.save_checkpoint(str(self.folder / "deepspeed")))
        self._remove("deepspeed")
        return seconds

    def plain_write(self) -> float:
        path = self.folder / f"plain-{self.world.rank}"

        def write() -> None:
            with path.open("wb") as file:
                file.write(memoryview(self._source).cast("B"))
                os.fsync(file.fileno())

        seconds = self._timed(write)
        path.unlink()
        return seconds

    def _timed(self, action: Callable[[], object]) -> float:
        barrier()
        return _slowest(timed(action))

    def _remove(self, name: str) -> None:
        barrier()
        if self.world.is_main:
            shutil.rmtree(self.folder / name)


class _Peak:
    """The most memory of its own that this process had meanwhile, looked at every 5 ms."""

    def __init__(self) -> None:
        self.bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> _Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.bytes = max(self.bytes, _resident_bytes())


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def _slowest(seconds: float) -> float:
    return max(float(text) for text in gather_texts(repr(seconds)))


def measure_ranks(world: World, folder: str, repetitions: int, quick: bool) -> dict[str, Any]:
    """What the ranks measure together; seconds by side."""
    shape = SMALL if quick else LARGE
    engine = build_engine(run_config(shape, zero_stage=1, precision=precision(), microsteps=world.size), world)
    for index in range(engine.accumulation_steps):
        ids = torch.randint(shape.vocabulary_size, (4, 65))
        engine.micro_step(batch_of(index, ids), global_target_tokens=1024)
    engine.step(1e-4)
    saver = Saver(engine, Path(folder), world)
    sides = {
        "ours": saver.ours, "copy": saver.memory_copy, "deepspeed": saver.deepspeed, "write": saver.plain_write,
    }  # fmt: skip
    times = interleave(sides, repetitions)
    totals = [sum(int(text) for text in gather_texts(str(n))) for n in (saver.state_bytes, saver.extra_bytes)]
    engine.close()
    return {**times, "to_disk": saver.seconds_to_disk, "state_bytes": totals[0], "extra_bytes": totals[1]}


def measure(*, quick: bool, command: str) -> list[Result]:
    """Ratios of stall, bandwidth and memory."""
    repetitions = 2 if quick else 5
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        arguments = {"folder": folder, "repetitions": repetitions, "quick": quick}
        found = run_in_ranks("benchmarks.checkpoint:measure_ranks", RANKS, arguments, timeout_s=400)
    sides = (
        ("checkpoint.stall_vs_memcpy", found["ours"], found["copy"], "memory copy, s", "copy"),
        ("checkpoint.stall_vs_deepspeed", found["ours"], found["deepspeed"], "DeepSpeed, s", "deepspeed"),
        ("checkpoint.bandwidth_vs_write", found["write"], found["to_disk"], "write + fsync, s", "write"),
    )
    results = [
        Result(metric, median_ratio(above, below), "ratio", baseline, median(found[side]), repetitions, command)
        for metric, above, below, baseline, side in sides
    ]
    megabytes = found["state_bytes"] / 1e6
    results += [
        Result("checkpoint.stall_s", median(found["ours"]), "s", "", None, repetitions, command),
        Result("checkpoint.state_mb", megabytes, "MB", "", None, 1, command),
        Result("checkpoint.extra_memory_vs_state", found["extra_bytes"] / 1e6 / megabytes, "ratio", "state, MB",
               megabytes, 1, command),
    ]  # fmt: skip
    return results
