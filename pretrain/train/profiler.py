"""Traces of chosen steps on chosen ranks, for ui.perfetto.dev: `metrics.profile`.

Takes a step -> `RUN/profiles/attempt-001/step-00000010-rank-00000.json.gz`, by torch.profiler: operators, kernels,
shapes and memory of forward, backward and optimizer. A step that is not chosen costs a look at a set. A trace that
cannot be written costs one warning.
"""

from __future__ import annotations

import contextlib
import gzip
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from pretrain.config.schema import ProfileConfig
from pretrain.errors import StoreError
from pretrain.log import Log
from pretrain.store import Store
from pretrain.train.watch import Beat


class StepProfiler:
    """Profiles this rank's part of the chosen steps.

    Args:
        attempt: for the files' names.
        beat: told that a trace is begun or written, which takes longer than a step.
    """

    def __init__(self, config: ProfileConfig, store: Store, attempt: int, rank: int, log: Log, beat: Beat) -> None:
        self._beat = beat
        self._steps = frozenset(config.steps) if rank in config.ranks else frozenset()
        self._store, self._attempt, self._rank, self._log = store, attempt, rank, log

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Open while optimizer step `step`, from 1, is computed."""
        if step not in self._steps:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._beat("record")
        with profile(activities=activities, record_shapes=True, profile_memory=True) as found:
            yield
        self._beat("record")
        key = f"profiles/attempt-{self._attempt:03d}/step-{step:08d}-rank-{self._rank:05d}.json.gz"
        try:
            with tempfile.TemporaryDirectory(prefix="trace-") as folder:
                trace = Path(folder) / "trace.json"
                found.export_chrome_trace(str(trace))
                self._store.put(key, gzip.compress(trace.read_bytes(), compresslevel=3))
        except (StoreError, OSError, RuntimeError) as error:
            self._log.warning("a trace could not be written", step=step, why=error)
            return
        self._log.info("traced; open it at ui.perfetto.dev", step=step, trace=f"{self._store.url}/{key}")
