"""Weights & Biases, offline or online: one wandb run over all attempts, never fatal, never blocking.

Takes records from the loop → a bounded queue → a daemon thread that alone touches wandb (importing
and starting it takes seconds). The JSON lines are the truth: the record of number i over all attempts is
logged under wandb's own count i (wandb drops points whose count does not rise), with `step` as the
x axis and `attempt` beside it. wandb's service loses what it has not flushed when a rank is killed
(measured: 40 of 40 records after 8 s), so the next attempt first sends what the server lacks;
offline, where there is no server, each attempt's directory holds the whole run: sync the newest.
A server that does not answer means one warning and offline files. Artifacts go along by choice.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

from pretrain.config.schema import RunConfig
from pretrain.log import Log
from pretrain.metrics.history import records_before
from pretrain.metrics.queued import CLOSE_TIMEOUT_S, Numbered, QueuedSink, flatten
from pretrain.metrics.sinks import MetricsHome
from pretrain.metrics.wandb_artifacts import Artifacts
from pretrain.metrics.wandb_run import INIT_TIMEOUT_S, start_run, teardown
from pretrain.store import make_scratch


class WandbSink:
    """Sends records to wandb from its own thread; construction, `write` and a dead server cost the loop nothing."""

    def __init__(
        self,
        config: RunConfig,
        run_directory: MetricsHome,
        attempt: int,
        *,
        log: Log | None = None,
        init_timeout_s: float = INIT_TIMEOUT_S,
    ) -> None:
        self._config = config
        self._run_directory = run_directory
        self._attempt = attempt
        self._log = log or Log()
        self._init_timeout_s = init_timeout_s
        self._scratch = make_scratch("wandb")
        self._sink = QueuedSink("wandb", self._track, log=self._log)

    def write(self, record: dict[str, Any]) -> None:
        self._sink.write(record)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Ends the wandb run of this attempt; waits at most `timeout_s` seconds for what is queued."""
        if self._sink.close(timeout_s):
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _track(self, records: Iterator[Numbered]) -> None:
        """The thread."""
        try:
            run = self._start()
            artifacts = Artifacts(self._config, self._run_directory, self._log)
            artifacts.begin(run)
            first = self._catch_up(run)
            for number, record in records:
                run.log({**flatten(record), "attempt": self._attempt}, step=first + number)
                artifacts.look(run)
            artifacts.look(run, now=True)
            run.finish()
        finally:
            teardown()  # ends wandb's service process now instead of at exit

    def _catch_up(self, run: Any) -> int:
        """Sends what wandb lacks of the earlier attempts; gives the count of this attempt's first record."""
        earlier = records_before(self._run_directory.store, self._attempt)
        known = int(run.step)  # what the server has; 0 offline
        for count, (attempt, record) in enumerate(earlier[known:], start=known):
            run.log({**flatten(record), "attempt": attempt}, step=count)
        return max(known, len(earlier))

    def _start(self) -> Any:
        return start_run(
            self._config, self._run_directory, scratch=self._scratch, init_timeout_s=self._init_timeout_s, log=self._log
        )


def open_sink(config: RunConfig, home: MetricsHome, attempt: int, log: Log) -> WandbSink:
    """See `sinks._TRACKERS`."""
    return WandbSink(config, home, attempt, log=log)
