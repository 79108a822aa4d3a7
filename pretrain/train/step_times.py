"""Where the time of steps goes on each rank, and what memory it holds: gathered when a step is logged.

Takes the engine's and the loader's clocks -> gives means per step since the last record, one value per rank, and what
they say of the whole. Nothing here waits for a device; the one collective is at logged steps.
"""

from __future__ import annotations

import statistics
from typing import Any

import psutil
import torch

from pretrain.engine.distributed import gather_floats
from pretrain.engine.engine import Engine
from pretrain.train.own_work import OwnWork

_MEANS = ("data_wait_s", "forward_s", "backward_s", "optimizer_s")
_MEMORY = ("host_bytes", "allocated_bytes", "reserved_bytes")


class StepTimes:
    """Sums of this rank between two records."""

    def __init__(self, engine: Engine, own_work: OwnWork, device: torch.device) -> None:
        self._engine, self._own_work, self._device = engine, own_work, device
        self._process = psutil.Process()
        self._steps = self._tokens = 0
        self._seen = self._clocks()

    def finish_step(self, target_tokens: int) -> None:
        """Counts a step of this rank."""
        self._steps += 1
        self._tokens += target_tokens

    def gather(self, step_s: float | None) -> dict[str, Any]:
        """The fields of a record since the last one, table `ranks` included. A collective.

        Args:
            step_s: mean wall time of a step, as every rank measured it; None if there was none.
        """
        now, steps = self._clocks(), max(1, self._steps)
        means = [(new - old) / steps for new, old in zip(now, self._seen, strict=True)]
        speed = self._tokens / (self._steps * step_s) if step_s and self._steps else 0.0
        self._seen, self._steps, self._tokens = now, 0, 0
        rows = gather_floats([*means, speed, *self._memory()])
        names = (*_MEANS, "tokens_per_second", *_MEMORY)
        ranks = {name: [row[place] for row in rows] for place, name in enumerate(names)}
        ranks["own_s"] = [
            wait + forward for wait, forward in zip(ranks["data_wait_s"], ranks["forward_s"], strict=True)
        ]
        if self._device.type != "cuda":
            del ranks["allocated_bytes"], ranks["reserved_bytes"]
        median_s = statistics.median(ranks["own_s"])
        return {
            "data_wait_s": max(ranks["data_wait_s"]),
            **{name: statistics.fmean(ranks[name]) for name in _MEANS[1:]},
            "straggling": max(ranks["own_s"]) / median_s if median_s > 0 else None,
            **{name: max(ranks[name]) for name in _MEMORY if name in ranks},
            "ranks": {name: [_brief(value) for value in values] for name, values in ranks.items()},
        }

    def _clocks(self) -> tuple[float, ...]:
        engine = self._engine
        return self._own_work.waited_s, engine.forward_s, engine.backward_s, engine.optimizer_s

    def _memory(self) -> list[float]:
        host = float(self._process.memory_info().rss)
        if self._device.type != "cuda":
            return [host, 0.0, 0.0]
        device = self._device
        return [host, float(torch.cuda.memory_allocated(device)), float(torch.cuda.memory_reserved(device))]


def _brief(value: float) -> float:
    """Four digits: a thousand ranks are written at every record."""
    return float(f"{value:.4g}")
