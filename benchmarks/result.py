"""What a benchmark gives: a metric with its unit, what it was compared with, and how often it ran.

`interleave` runs the sides of a comparison in turn, so that a slow minute of the machine hits both.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from launch.tables import format_table

CPU_TIME = "PRETRAIN_BENCHMARK_CPU_TIME"
_Value = TypeVar("_Value")
HEADINGS = ("metric", "value", "unit", "baseline", "its value", "runs")


@dataclass(frozen=True, slots=True)
class Result:
    """One measured metric.

    Attributes:
        metric: its name in the contract, `benchmark.what`.
        value: the median.
        unit: of `value` and `baseline_value`; `ratio` where they were divided.
        baseline: what it was compared with, or an empty string.
        baseline_value: the baseline's own median in the unit that `baseline` names, or None.
        repetitions: measurements of each side.
        command: what to type to measure it again.
    """

    metric: str
    value: float
    unit: str
    baseline: str
    baseline_value: float | None
    repetitions: int
    command: str


def counts_cpu_time() -> bool:
    """Whether the CPU time of this process is measured: what other work on the machine hardly changes."""
    return bool(os.environ.get(CPU_TIME))


def clock() -> float:
    """Seconds, of the wall or of this process's CPUs, from an arbitrary start."""
    return time.process_time() if counts_cpu_time() else time.perf_counter()


def timed(action: Callable[[], object]) -> float:
    """Seconds that `action` takes."""
    start = clock()
    action()
    return clock() - start


def interleave(sides: dict[str, Callable[[], _Value]], repetitions: int) -> dict[str, list[_Value]]:
    """Measures every side once per repetition, in turn and in alternating order."""
    values: dict[str, list[_Value]] = {name: [] for name in sides}
    for repetition in range(repetitions):
        names = list(sides) if repetition % 2 == 0 else list(reversed(sides))
        for name in names:
            values[name].append(sides[name]())
    return values


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median of the ratios of neighbouring measurements: steadier than the ratio of medians."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def as_json(results: Sequence[Result]) -> str:
    return json.dumps([asdict(result) for result in results], indent=2)


def as_table(results: Sequence[Result]) -> str:
    rows = [(r.metric, r.value, r.unit, r.baseline or None, r.baseline_value, r.repetitions) for r in results]
    return format_table(HEADINGS, rows)
