"""A run's directory: what lies where, how a run is found, claimed, stopped and read.

run.yaml  tokenizer.json  journal/  lease/  attempts/  control/  checkpoints/  metrics/  logs/  samples/  plots/
compiled/ (what torch compiled, where model.kernels asks for it)
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from pretrain.config import ConfigChange, RunConfig, describe_changes, diff_configs
from pretrain.config.schema import NAME_PATTERN
from pretrain.errors import ConfigError, FencedError, PretrainError, RunError
from pretrain.rundir.journal import Event, JournalWriter, read_events
from pretrain.rundir.lease import Lease
from pretrain.rundir.records import DamagedFileError, decode_record, encode_record
from pretrain.rundir.run_yaml import CONFIG_KEY, encode_config, read_config, read_total_steps
from pretrain.rundir.status import RunStatus, metrics_key, read_status
from pretrain.store import NotFoundError, Store, UnsupportedError, open_store

ResumeMode = Literal["never", "auto", "must"]
_NAME = re.compile(NAME_PATTERN)


@dataclass(frozen=True, slots=True)
class Request:
    """Something asked of a living run: `stop` at the next step with a checkpoint, or `now` without."""

    kind: str
    now: bool
    t: float
    key: str


class RunDirectory:
    """One run. Cheap to make; nothing is read until asked for."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.url = store.url
        self.name = store.url.rstrip("/").rsplit("/", 1)[-1]
        self._unwritten: RunConfig | None = None
        self._checkpoints: Store | None = None

    def __repr__(self) -> str:
        return f"RunDirectory({self.url!r})"

    # ----------------------------------------------------------------------------------- finding runs

    @classmethod
    def locate(cls, name_or_path: str) -> RunDirectory:
        """The run at a path or URL, or of a name under PRETRAIN_HOME (default ./runs).

        Raises:
            RunError: there is none; the message lists names that are near.
        """
        if not name_or_path:
            raise RunError("run= is empty. It must be a run's name or path. See pretrain list.")
        is_path = "/" in name_or_path or name_or_path in (".", "..")
        if not is_path and not _NAME.fullmatch(name_or_path):
            raise RunError(
                f"run={name_or_path!r} is not a run's name. A name has letters, digits, dot, dash, underscore. "
                "Give a name as in pretrain list, or a path with a slash."
            )
        home = open_store(home_url())
        candidates = [open_store(name_or_path)] if is_path else [home.child(name_or_path), open_store(name_or_path)]
        for store in candidates:
            if store.exists(CONFIG_KEY):
                return cls(store)
        if is_path:
            raise RunError(
                f"run={name_or_path} is not a run: {candidates[0].url} has no run.yaml. "
                "A run is a directory that pretrain train made. Correct the path or see pretrain list."
            )
        names = _run_names(home)
        near = difflib.get_close_matches(name_or_path, names, n=3, cutoff=0.5) or names[:5]
        hint = f"Near names: {', '.join(near)}" if near else "There are no runs there yet"
        raise RunError(
            f"run={name_or_path} does not exist in {home.url}. A run is named as in pretrain list. "
            f"{hint}. Give a path, or set PRETRAIN_HOME to look elsewhere."
        )

    @classmethod
    def claim(
        cls, config: RunConfig, *, resume: ResumeMode, home: str | None = None
    ) -> tuple[RunDirectory, list[ConfigChange]]:
        """The directory of a run that is about to train: a new one, or an old one whose config may change so.

        A new run's `run.yaml` is written here, by exactly one of several that race for the name. That
        of an old run stays as it is until the lease is held: the first `journal(lease)` writes it (a
        second trainer that is turned away must not change a running run). Recording the changes in
        the journal is the caller's duty.

        Args:
            config: of the run; its name is the directory's.
            resume: `never` wants a new run, `must` an old one, `auto` takes either.
            home: directory of the runs; None means PRETRAIN_HOME, or ./runs.

        Raises:
            RunError: the run exists (`never`) or does not (`must`), or its place is taken by other files.
            ConfigError: a field changed that a resume must not change.
            DamagedFileError: the old run.yaml is damaged.
        """
        run = cls(open_store(home_url(home)).child(config.name))
        for _ in range(2):
            if run.store.exists(CONFIG_KEY):
                return run, run._prepare_resume(config, resume)
            if resume == "must":
                raise RunError(
                    f"run={run.url} does not exist. --resume=must only goes on with a run that is there. "
                    "Correct --name or PRETRAIN_HOME, or use --resume auto to start it if it is new."
                )
            others = run.store.names()
            if others and not run.store.exists(CONFIG_KEY):
                raise RunError(
                    f"run={run.url} has no run.yaml but holds {', '.join(others[:5])}. A new run needs an empty place. "
                    "Choose another --name or move those files away."
                )
            if run._create(config):
                return run, []
        raise RunError(f"run={run.url} appears and disappears. Another process is working on it. Try again.")

    def _prepare_resume(self, config: RunConfig, resume: ResumeMode) -> list[ConfigChange]:
        if resume == "never":
            raise RunError(
                f"name={self.name} exists already: {self.url}. --resume=never only starts new runs. "
                f"Go on with pretrain resume {self.name} (or --resume auto), or choose another --name."
            )
        changes = diff_configs(self.config(), config)
        refused = [change for change in changes if change.policy == "refused"]
        if refused:
            raise ConfigError(
                [
                    f"{line}. {self.name} was trained with the old value, and its state would not fit. "
                    "Keep the old value or start a new run with another --name."
                    for line in describe_changes(refused)
                ]
            )
        self._unwritten = config if changes else None
        return changes

    # ----------------------------------------------------------------------------------------- config

    def config(self) -> RunConfig:
        """The config as resolved.

        Raises:
            DamagedFileError: run.yaml does not match its sha256, or does not fit this version's schema.
            NotFoundError: there is none.
        """
        return read_config(self.store)

    def write_config(self, config: RunConfig) -> None:
        """Replaces run.yaml; for the holder of the lease."""
        self.store.put(CONFIG_KEY, encode_config(config))

    def _create(self, config: RunConfig) -> bool:
        place = self.store.local_path(CONFIG_KEY)
        if place is not None:
            with contextlib.suppress(OSError):  # the write below explains what is wrong
                place.parent.mkdir(parents=True, exist_ok=True)
                place.parent.chmod(0o700)  # logs, samples and configs are their owner's alone
        try:
            return self.store.put_if_absent(CONFIG_KEY, encode_config(config))
        except UnsupportedError:
            # An object store cannot decide a race of two creators; the lease decides who trains.
            self.write_config(config)
            return True

    # ----------------------------------------------------------------------------------------- layout

    @property
    def checkpoints(self) -> Store:
        """Store of the checkpoints: here, or where the config says.

        Raises:
            DamagedFileError: run.yaml cannot be read, so it is not known where they are.
        """
        if self._checkpoints is None:
            with suppress(NotFoundError):
                elsewhere = self.config().checkpoint.directory
                self._checkpoints = open_store(elsewhere) if elsewhere else None
        return self._checkpoints or self.store.child("checkpoints")

    def metrics_key(self, attempt: int) -> str:
        return metrics_key(attempt)

    def log_key(self, attempt: int, rank: int) -> str:
        return f"logs/attempt-{attempt:03d}/rank-{rank:05d}.log"

    # ---------------------------------------------------------------------------------------- journal

    def journal(self, lease: Lease) -> JournalWriter:
        """The journal, open for the holder of the lease; writes a run.yaml that `claim` left to be written.

        Raises:
            FencedError: the lease is lost already.
        """
        lease.check()
        if self._unwritten is not None:
            self.write_config(self._unwritten)
            self._unwritten = None
        return JournalWriter(self.store, lease)

    def events(self) -> list[Event]:
        """What happened, in order, without what fenced processes added. Raises DamagedFileError."""
        return read_events(self.store)

    def next_attempt(self) -> int:
        """A number that no attempt has used, fenced ones included; the first is 1."""
        used = [int(event.fields.get("attempt", 0)) for event in read_events(self.store, fenced=True)]
        for folder in ("metrics", "logs"):
            stems = [name.removeprefix("attempt-").removesuffix(".jsonl") for name in self.store.names(folder)]
            used += [int(stem) for stem in stems if stem.isdigit()]
        return max(used, default=0) + 1

    def open_attempt(self, attempt: int) -> None:
        """From now on only this attempt's ranks may publish. Raises StoreError.

        Ranks that were cut off from their controller live on for some seconds under the lease of the same
        controller; the number tells them from those that replaced them.
        """
        self.store.put(f"attempts/{attempt:06d}.json", encode_record({"attempt": attempt, "t": time.time()}))

    def check_attempt(self, attempt: int) -> None:
        """Called by a rank right before anything is published or deleted. Raises FencedError or StoreError."""
        stems = [name.removesuffix(".json") for name in self.store.names("attempts")]
        newest = max([int(stem) for stem in stems if stem.isdigit()], default=0)
        if newest > attempt:
            raise FencedError(
                f"attempt {newest} of {self.url} is newer than attempt {attempt} of this process. "
                "Only the newest may publish. This process ends and writes nothing more."
            )

    # --------------------------------------------------------------------------------------- requests

    def request_stop(self, *, now: bool = False) -> None:
        """Asks the run to stop: with a checkpoint after the current step, or at once."""
        body = {"kind": "stop", "now": now, "t": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
        moment = time.time_ns()
        while self.store.exists(_request_key(moment)):
            moment += 1
        self.store.put(_request_key(moment), encode_record(body))

    def pending_requests(self) -> list[Request]:
        """Requests that nobody has cleared, oldest first; a damaged one counts as the plain request of its name."""
        requests = []
        for name in self.store.names("control"):
            stamp, dash, kind = name.removesuffix(".json").partition("-")
            if not dash or not stamp.isdigit():
                continue
            key = f"control/{name}"
            try:
                now = bool(decode_record(self.store.get(key), key, "").get("now", False))
            except NotFoundError:
                continue
            except DamagedFileError:
                now = False
            requests.append(Request(kind, now, int(stamp) / 1e9, key))
        return requests

    def clear_requests(self) -> None:
        """Removes the pending requests: when they are done, and before a run starts anew."""
        for request in self.pending_requests():
            self.store.delete(request.key)

    # ----------------------------------------------------------------------------------------- status

    def status(self) -> RunStatus:
        """How the run stands; only reads. Raises DamagedFileError naming the file."""
        return read_status(self.store, self.name, read_total_steps(self.store))


def list_runs(home: str | None = None) -> list[RunStatus]:
    """Every run in a home, by name; one with a damaged file is listed as damaged, with the reason."""
    store = open_store(home_url(home))
    result = []
    for name in _run_names(store):
        try:
            result.append(RunDirectory(store.child(name)).status())
        except PretrainError as error:
            result.append(RunStatus(name=name, state="damaged", reason=str(error)))
    return result


def home_url(home: str | None = None) -> str:
    """Where runs live: the argument, PRETRAIN_HOME, or ./runs."""
    return home or os.environ.get("PRETRAIN_HOME") or "runs"


def _run_names(home: Store) -> list[str]:
    return [name for name in home.names() if home.exists(f"{name}/{CONFIG_KEY}")]


def _request_key(moment_ns: int) -> str:
    return f"control/{moment_ns:020d}-stop.json"
