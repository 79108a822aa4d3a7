"""A run's series through Ray's own metrics: `metrics.prometheus.through_ray`, as `ray_pretrain_…` on every node's port.

Takes a run directory -> gauges of `ray.util.metrics`, set every few seconds from a thread of the controller's process.
The same series as the dashboard's `/metrics`; what Ray's Prometheus and Grafana are set up for shows them without
another target. Whatever goes wrong here costs one warning. Ray passes values on about ten seconds late.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from launch.monitor.prometheus import SERIES, run_samples
from launch.monitor.reader import RunReader
from pretrain.log import Log
from pretrain.rundir import RunDirectory

EVERY_S = 5.0


class RayMetrics:
    """Gauges by series; a series whose labels are new is a new gauge for Ray only at its first value."""

    def __init__(self, run: RunDirectory) -> None:
        self._reader = RunReader(run)
        self._gauges: dict[str, Any] = {}

    def export(self) -> int:
        """Reads what is new and sets every gauge; gives how many values were set."""
        from ray.util.metrics import Gauge

        self._reader.refresh()
        values = 0
        for series, samples in run_samples(self._reader).items():
            for labels, value in samples:
                gauge = self._gauges.get(series)
                if gauge is None:
                    gauge = self._gauges[series] = Gauge(series, SERIES[series][1], tag_keys=tuple(labels))
                gauge.set(value, tags=labels)
                values += 1
        return values


@contextlib.contextmanager
def exported_through_ray(run: RunDirectory, log: Log, *, wanted: bool) -> Iterator[None]:
    """While the context is open a thread exports the run, if that is wanted."""
    if not wanted:
        yield
        return
    ended = threading.Event()

    def work() -> None:
        metrics = RayMetrics(run)
        while not ended.wait(EVERY_S):
            try:
                metrics.export()
            except Exception as error:  # Ray's, or of a damaged run: the controller must not care
                log.warning(f"metrics no longer go through Ray: {type(error).__name__}: {error}")
                return

    thread = threading.Thread(target=work, name="ray metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(EVERY_S)
