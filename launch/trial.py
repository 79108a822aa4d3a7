"""A run that `prove` trains in processes of its own, watches and kills.

Takes a directory → `pretrain train` and `pretrain resume` as subprocesses, each in a session of its own (Ctrl-C
reaches them only through here). A kill returns evidence that it fired, or raises. Whatever happens,
`close` leaves no process of the run behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from pretrain.errors import ExitCode, PretrainError, UserError
from pretrain.metrics.history import decode_records
from pretrain.rundir import EventKind, ProcessIdentity, RunDirectory, is_alive, wait_until_gone
from pretrain.store import NotFoundError, open_store

POLL_S = 0.02
PROOF_OF_DEATH_S = 60.0
SAVE_AND_END_S = 30.0
_TAIL_BYTES = 4096


class TrialRun:
    """One run under `home`, named `name`.

    Args:
        stall_s: longest time without a new step before the trial is given up.
    """

    def __init__(self, home: Path, name: str, *, stall_s: float) -> None:
        self.directory = RunDirectory(open_store(home / name))
        self.name = name
        self._home = home
        self._stall_s = stall_s
        self._process: subprocess.Popen[bytes] | None = None

    def train(self, config: str, overrides: Sequence[str]) -> None:
        self._start("train", config, *overrides, "--name", self.name)

    def resume(self) -> None:
        self._start("resume", str(self._home / self.name))

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def await_step(self, step: int, *, after_attempt: int = 0) -> tuple[int, int]:
        """Waits until an attempt later than `after_attempt` has done `step` steps; gives (attempt, steps done).

        Raises:
            PretrainError: the run ended before, or no step comes any more.
        """
        seen, moved = (0, 0), time.monotonic()
        while True:
            attempt, done = self._progress()
            if attempt > after_attempt and done >= step:
                return attempt, done
            if (attempt, done) != seen:
                seen, moved = (attempt, done), time.monotonic()
            code = self._process.poll() if self._process else None
            if code is not None:
                raise self._failure(code, f"before step {step}, at which the next kill should have fired")
            if time.monotonic() - moved > self._stall_s:
                raise PretrainError(
                    f"the {self.name} run has made no step for {self._stall_s:.0f} s. A proof needs a run that "
                    f"goes on. {self._tail()}"
                )
            time.sleep(POLL_S)

    def kill_train(self) -> str:
        """SIGKILL to the `pretrain` process itself; gives the evidence.

        Raises:
            PretrainError: it had ended by itself.
        """
        assert self._process is not None
        self._process.kill()
        code = self._process.wait()
        if code != -signal.SIGKILL:
            raise self._failure(code, "before the kill fired")
        return "the process returned -9"

    def kill_rank(self, attempt: int, rank: int) -> tuple[int, str]:
        """SIGKILL to a rank of an attempt; gives its pid and the evidence.

        Raises:
            PretrainError: the rank had ended, or the journal does not say that signal 9 ended it.
        """
        (pid,) = self._kill(attempt, [rank])
        return pid, self._await_fault(attempt, f"rank {rank}", rank, exit_code=-signal.SIGKILL)

    def kill_ranks(self, attempt: int) -> tuple[int, str]:
        """The same to all ranks of an attempt at once; gives the pid of the first."""
        pids = self._kill(attempt, sorted(self._processes(attempt)))
        return pids[0], self._await_fault(attempt, "all ranks", exit_code=-signal.SIGKILL)

    def kill_agent(self, attempt: int, rank: int) -> tuple[int, str]:
        """SIGKILL to the agent of a rank, which takes its ranks along; gives its pid and the evidence."""
        identity = self._process_of(attempt, rank)
        pid = psutil.Process(identity.pid).ppid()
        if not is_alive(identity):
            raise PretrainError(f"the kill of the agent of rank {rank} did not fire: {identity} had ended.")
        os.kill(pid, signal.SIGKILL)
        return pid, self._await_fault(attempt, f"the agent of rank {rank}", cause="node")

    def _kill(self, attempt: int, ranks: Sequence[int]) -> list[int]:
        identities = [self._process_of(attempt, rank) for rank in ranks]
        for identity in identities:
            if not is_alive(identity):
                raise PretrainError(
                    f"the kill of ranks {list(ranks)} did not fire: {identity} had ended. Use more steps."
                )
        for identity in identities:
            os.kill(identity.pid, signal.SIGKILL)
        return [identity.pid for identity in identities]

    def _await_fault(self, attempt: int, who: str, rank: int | None = None, **expected: object) -> str:
        """The journal's fault of an attempt (of `rank`, if it is given), which must be as expected."""
        deadline = time.monotonic() + PROOF_OF_DEATH_S
        while time.monotonic() < deadline:
            for event in self.directory.events():
                told = event.fields if event.kind == EventKind.FAULT else {}
                if told.get("attempt") == attempt and rank in (None, told["rank"]):
                    found = {name: told[name] for name in expected}
                    said = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found.items())
                    if found != expected:
                        raise PretrainError(f"the kill of {who} did not fire: the journal says {said}.")
                    return f"the journal has a fault with {said}"
            time.sleep(POLL_S)
        raise PretrainError(f"{who} was killed, but the journal has no fault of it. {self._tail()}")

    def await_end(self) -> None:
        """Waits for the run to be complete. Raises PretrainError when it ends in any other way."""
        assert self._process is not None
        code = self._process.wait()
        if code != ExitCode.DONE:
            raise self._failure(code, "")

    def close(self) -> None:
        """Ends what still runs: asks first, as Ctrl-C would, then kills; waits for the ranks too."""
        process = self._process
        if process is None:
            return
        for word in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
            if process.poll() is not None:
                break
            process.send_signal(word)
            try:
                process.wait(SAVE_AND_END_S)
            except subprocess.TimeoutExpired:
                continue
        wait_until_gone([identity for identity in self._all_ranks() if is_alive(identity)])

    def _start(self, command: str, *arguments: str) -> None:
        self._home.mkdir(parents=True, exist_ok=True)
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "launch.cli", command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PRETRAIN_HOME": str(self._home)},
                start_new_session=True,
            )

    def _progress(self) -> tuple[int, int]:
        """(newest attempt that has recorded a step, steps it has done); zeros before the first."""
        store = self.directory.store
        stems = [name.removeprefix("attempt-").removesuffix(".jsonl") for name in store.names("metrics")]
        for attempt in sorted((int(stem) for stem in stems if stem.isdigit()), reverse=True):
            key = self.directory.metrics_key(attempt)
            try:
                size = store.size(key)
                start = max(0, size - _TAIL_BYTES)
                records = decode_records(store.get_range(key, start, size - start))
            except NotFoundError:
                continue
            if records:
                return attempt, max(record["step"] for record in records)
        return 0, 0

    def _process_of(self, attempt: int, rank: int) -> ProcessIdentity:
        found = self._processes(attempt).get(rank)
        if found is None:
            raise PretrainError(
                f"the journal of the {self.name} run names no process of rank {rank}, attempt {attempt}."
            )
        return found

    def _processes(self, attempt: int) -> dict[int, ProcessIdentity]:
        for event in reversed(self.directory.events()):
            if event.kind == EventKind.RANKS_STARTED and event.fields["attempt"] == attempt:
                return {int(one["rank"]): ProcessIdentity.from_json(one) for one in event.fields["processes"]}
        return {}

    def _all_ranks(self) -> list[ProcessIdentity]:
        return [
            ProcessIdentity.from_json(process)
            for event in self.directory.events()
            if event.kind == EventKind.RANKS_STARTED
            for process in event.fields["processes"]
        ]

    @property
    def _log(self) -> Path:
        return self._home / f"{self.name}.log"

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-15:]
        return "\n".join(["The end of its output:", *lines])

    def _failure(self, code: int, when: str) -> PretrainError:
        kind = UserError if code == ExitCode.USER_ERROR else PretrainError
        return kind(f"the {self.name} run ended with exit code {code} {when}".rstrip() + f". {self._tail()}")
