"""Ranks from the zygote: groups of processes with their logs, exit codes and ends."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]


class Group:
    """The rank processes of one start.

    Attributes:
        codes: exit code of each rank that has ended (negative: a signal).
    """

    def __init__(self, pids: list[int], logs: list[Path]) -> None:
        self.pids, self.logs = pids, logs
        self.codes: dict[int, int] = {}
        self._over = threading.Event()

    def heard(self, pid: int, code: int) -> None:
        self.codes[self.pids.index(pid)] = code
        if len(self.codes) == len(self.pids):
            self._over.set()

    def wait(self, timeout_s: float) -> bool:
        """Whether all ranks ended in time."""
        return self._over.wait(timeout_s)

    def wait_for_one(self, timeout_s: float) -> bool:
        """Whether a rank ended in time."""
        deadline = time.monotonic() + timeout_s
        while not self.codes and time.monotonic() < deadline:
            time.sleep(0.005)
        return bool(self.codes)

    def kill(self) -> None:
        """SIGKILL to every rank that lives."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        self.wait(10.0)

    def output(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in self.logs)


@functools.cache
def shared_pool() -> RankPool:
    """The one of this process, started when it is first asked for; it ends with the process."""
    pool = RankPool().__enter__()
    atexit.register(pool.__exit__, None, None, None)
    return pool


class RankPool:
    """A context manager: the zygote lives as long as it."""

    def __enter__(self) -> RankPool:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
        environment.pop("PRETRAIN_TEST_SESSION", None)  # it outlives the test that needs it first; its ranks do not
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.zygote"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment, start_new_session=True,
        )  # fmt: skip
        self._answers: queue.Queue[list[int]] = queue.Queue()
        self._groups: dict[int, Group] = {}
        self._early: dict[int, int] = {}
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        assert self._ready.wait(900.0), "the zygote does not start"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20.0)
        self._thread.join(5.0)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def start(
        self,
        arguments: Sequence[str],
        *,
        ranks: int,
        environment: Mapping[str, str],
        logs: Sequence[Path],
        prelude: str = "",
        main: str = "pretrain.__main__:main",
        rendezvous: bool | None = None,
    ) -> Group:
        """Forks ranks that end with what `main`, a "module:function", gives for the arguments.

        Args:
            environment: beside this process's own.
            prelude: a "module:function" that is called first.
            rendezvous: whether the ranks are told of each other; None: when there are several.
        """
        variables = {**os.environ, **environment}
        order = {"ranks": ranks, "main": main, "arguments": list(arguments), "environment": variables}
        order["rendezvous"] = ranks > 1 if rendezvous is None else rendezvous
        line = json.dumps({**order, "prelude": prelude, "logs": [str(log) for log in logs]})
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        group = Group(self._answers.get(timeout=120.0), list(logs))
        with self._lock:
            for pid in group.pids:
                self._groups[pid] = group
                if pid in self._early:
                    group.heard(pid, self._early.pop(pid))
        return group

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "ready" in message:
                self._ready.set()
            elif "pids" in message:
                self._answers.put(message["pids"])
            else:
                with self._lock:
                    group = self._groups.pop(message["pid"], None)
                    if group is None:
                        self._early[message["pid"]] = message["code"]
                    else:
                        group.heard(message["pid"], message["code"])
