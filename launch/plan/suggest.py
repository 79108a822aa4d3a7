"""Which layout fits, and which of those is the fastest. PURE.

Takes a config, ranks, machine → the config with ZeRO stage, micro-batch and recomputation chosen. The global batch
stays: it belongs to the science, the rest to the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launch.plan.machines import Accelerator
from launch.plan.memory import Memory, memory_per_rank
from launch.plan.speed import Speed, speed_of
from pretrain.config import RunConfig


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to lay a run out over ranks."""

    config: RunConfig
    memory: Memory
    speed: Speed

    def changes(self, given: RunConfig) -> list[str]:
        """What differs from another config, as `key=value` words of a command."""
        pairs = [
            ("engine.zero_stage", given.engine.zero_stage, self.config.engine.zero_stage),
            ("batch.micro_batch_size", given.batch.micro_batch_size, self.config.batch.micro_batch_size),
            (
                "engine.activation_checkpointing",
                given.engine.activation_checkpointing,
                self.config.engine.activation_checkpointing,
            ),
        ]
        return [f"{key}={str(new).lower()}" for key, old, new in pairs if old != new]


def layout_of(config: RunConfig, ranks: int, machine: Accelerator) -> Layout:
    """The config's own layout."""
    return Layout(config, memory_per_rank(config, ranks), speed_of(config, ranks, machine))


def best_layout(config: RunConfig, ranks: int, machine: Accelerator) -> Layout | None:
    """The fastest layout that fits, the simplest of equals; None if none fits."""
    fitting = [
        layout
        for candidate in candidates(config, ranks)
        if (layout := layout_of(candidate, ranks, machine)).memory.total_bytes <= machine.memory_bytes
    ]
    # Two layouts within half a percent are equal: then the lower stage, and no recomputation.
    return min(fitting, key=lambda layout: _order(layout), default=None)


def _order(layout: Layout) -> tuple[float, int, bool, int]:
    engine = layout.config.engine
    time = round(layout.speed.step_s, 3 - len(str(int(layout.speed.step_s))))
    return time, engine.zero_stage, engine.activation_checkpointing, -layout.config.batch.micro_batch_size


def candidates(config: RunConfig, ranks: int) -> Iterator[RunConfig]:
    """Every stage, with and without recomputation, with each micro-batch that divides the global batch."""
    total = config.batch.global_batch_size
    sizes = {size for size in _powers_of_two(total) if total % size == 0 and total // size >= min(ranks, total)}
    for stage in (0, 1, 2, 3):
        for recomputed in (False, True):
            for size in sorted(sizes | {1}):
                engine = config.engine.model_copy(update={"zero_stage": stage, "activation_checkpointing": recomputed})
                batch = config.batch.model_copy(update={"micro_batch_size": size})
                yield config.model_copy(update={"engine": engine, "batch": batch})


def _powers_of_two(limit: int) -> Iterator[int]:
    size = 1
    while size <= limit:
        yield size
        size *= 2
