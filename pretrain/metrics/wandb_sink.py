"""Weights & Biases, offline or online: one wandb run over all attempts, never fatal, never blocking.

Takes records from the loop → a bounded queue → a daemon thread that alone touches wandb (importing
and starting it takes seconds). The JSON lines are the truth: the record of number i over all attempts is
logged under wandb's own count i (wandb drops points whose count does not rise), with `step` as the
x axis and `attempt` beside it. wandb's service loses what it has not flushed when a rank is killed
(measured: 40 of 40 records after 8 s), so the next attempt first sends what the server lacks;
offline, where there is no server, each attempt's directory holds the whole run: sync the newest.
A server that does not answer means one warning and offline files.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretrain.config.schema import RunConfig
from pretrain.errors import UserError
from pretrain.log import Log
from pretrain.metrics.history import records_before
from pretrain.metrics.queued import CLOSE_TIMEOUT_S, Numbered, QueuedSink, first_line, flatten
from pretrain.metrics.sinks import MetricsHome
from pretrain.store import NotFoundError, Store, UnsupportedError, make_scratch

ID_KEY = "metrics/wandb.json"
INIT_TIMEOUT_S = 15.0


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
            first = self._catch_up(run)
            for number, record in records:
                run.log({**flatten(record), "attempt": self._attempt}, step=first + number)
            run.finish()
        finally:
            _teardown()  # ends wandb's service process now instead of at exit

    def _catch_up(self, run: Any) -> int:
        """Sends what wandb lacks of the earlier attempts; gives the count of this attempt's first record."""
        earlier = records_before(self._run_directory.store, self._attempt)
        known = int(run.step)  # what the server has; 0 offline
        for count, (attempt, record) in enumerate(earlier[known:], start=known):
            run.log({**flatten(record), "attempt": attempt}, step=count)
        return max(known, len(earlier))

    def _start(self) -> Any:
        """The wandb run of this attempt, with `step` as the x axis."""
        wandb_id = obtain_id(self._run_directory.store)
        mode = self._config.metrics.wandb.mode
        try:
            run = self._init(wandb_id, mode)
        except BaseException as error:
            if mode != "online":
                raise
            _teardown()  # the service keeps a failed id "in use"
            run = self._init(wandb_id, "offline")
            self._log.warning(
                f"wandb is offline for this attempt: {first_line(error)}. "
                f"Send its records later with: wandb sync {run.settings.sync_dir}"
            )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def _init(self, wandb_id: str, mode: str) -> Any:
        wandb = _import_into(self._scratch)
        if mode == "online" and not wandb.login(prompt=False, verify=False):  # init would ask a person at the terminal
            raise UserError("no API key is configured (wandb login, or WANDB_API_KEY)")
        root = self._run_directory.store.local_path("")
        settings = wandb.Settings(
            init_timeout=self._init_timeout_s,
            console="off",  # the rank's output is the agent's
            disable_git=True,
            silent=True,
            root_dir=str(root) if root else ".",
        )
        choice = self._config.metrics.wandb
        return wandb.init(
            mode=mode,
            project=choice.project,
            entity=choice.entity,
            id=wandb_id,
            resume="allow",
            name=self._config.name,
            config=self._config.model_dump(mode="json"),
            settings=settings,
        )


def open_sink(config: RunConfig, home: MetricsHome, attempt: int, log: Log) -> WandbSink:
    """See `sinks._TRACKERS`."""
    return WandbSink(config, home, attempt, log=log)


def obtain_id(store: Store) -> str:
    """The wandb id of this run directory, drawn at the first call and the same ever after.

    Raises:
        StoreError: the file cannot be read or written.
    """
    drawn = uuid.uuid4().hex[:16]
    body = json.dumps({"id": drawn}).encode()
    try:
        if store.put_if_absent(ID_KEY, body):
            return drawn
    except UnsupportedError:  # only the holder of the lease writes metrics, so looking first is enough
        try:
            store.get(ID_KEY)
        except NotFoundError:
            store.put(ID_KEY, body)
            return drawn
    return str(json.loads(store.get(ID_KEY))["id"])


def _import_into(scratch: Path) -> Any:
    """wandb, which makes temporary folders when it is imported and removes them only at an orderly exit of Python."""
    before, tempfile.tempdir = tempfile.tempdir, str(scratch)
    try:
        import wandb
    finally:
        tempfile.tempdir = before
    return wandb


def _teardown() -> None:
    try:
        import wandb

        wandb.teardown()
    except BaseException:
        return  # nothing is left to end
