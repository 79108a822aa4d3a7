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
import queue
import shutil
import tempfile
import threading
import uuid
from pathlib import Path
from typing import Any

from pretrain.config.schema import RunConfig
from pretrain.errors import UserError
from pretrain.log import Log
from pretrain.metrics.history import read_attempts
from pretrain.metrics.sinks import MetricsHome, finite
from pretrain.store import NotFoundError, Store, UnsupportedError, make_scratch

ID_KEY = "metrics/wandb.json"
QUEUE_RECORDS = 10_000
INIT_TIMEOUT_S = 15.0
CLOSE_TIMEOUT_S = 20.0


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
        self._records: queue.Queue[tuple[int, dict[str, Any]] | None] = queue.Queue(QUEUE_RECORDS)
        self._written = 0  # records of this attempt, those that the queue had no room for included
        self._off = False  # wandb failed for good: records are no longer taken
        self._warned_full = False
        self._scratch = make_scratch("wandb")
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def write(self, record: dict[str, Any]) -> None:
        if self._off:
            return
        try:
            self._records.put_nowait((self._written, record))
        except queue.Full:
            if not self._warned_full:
                self._warned_full = True
                self._log.warning("wandb does not keep up and misses records; the JSON lines have them all")
        self._written += 1

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Ends the wandb run of this attempt; waits at most `timeout_s` seconds for what is queued."""
        if not self._off:
            try:
                self._records.put(None, timeout=timeout_s)
            except queue.Full:
                self._log.warning("wandb does not end in time; its last records may be missing")
                return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._log.warning("wandb does not end in time; its last records may be missing")
        else:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _work(self) -> None:
        """The thread: everything that wandb raises ends here, in one warning."""
        try:
            run = self._start()
            first = self._catch_up(run)
            while (item := self._records.get()) is not None:
                number, record = item
                run.log({**flatten(record), "attempt": self._attempt}, step=first + number)
            run.finish()
            _teardown()  # ends wandb's service process now instead of at exit
        except BaseException as error:  # wandb also raises SystemExit and bare exceptions of its service
            self._off = True
            self._log.warning(
                f"wandb is off for the rest of this attempt: {_first_line(error)}. Training and the JSON lines go on."
            )
            _teardown()

    def _catch_up(self, run: Any) -> int:
        """Sends what wandb lacks of the earlier attempts; gives the count of this attempt's first record."""
        attempts = read_attempts(self._run_directory.store)
        earlier = [(n, record) for n, records in attempts.items() if n < self._attempt for record in records]
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
                f"wandb is offline for this attempt: {_first_line(error)}. "
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


def flatten(record: dict[str, Any]) -> dict[str, Any]:
    """A record as flat wandb keys (`validation/prose/loss`); absent and non-finite values are left out."""
    flat: dict[str, Any] = {}
    for name, value in finite(record).items():
        if isinstance(value, dict):
            flat |= {f"{name}/{key}": item for key, item in flatten(value).items()}
        elif isinstance(value, bool):
            flat[name] = int(value)
        elif value is not None:
            flat[name] = value
    return flat


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


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
