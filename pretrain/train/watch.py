"""Signs of life of a rank, and the watchdog over each phase of its loop.

The loop says at each phase change what it does; under an agent the words go through a pipe that
drops rather than stalls, and the agent judges silence. Without an agent a thread here judges it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from typing import Any

from pretrain.errors import ExitCode
from pretrain.log import Log

_PR_SET_PDEATHSIG = 1


class Heartbeat:
    """Phase changes and events of this rank, one JSON object per line."""

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd
        self.phase_name = "start"
        self.step = 0
        self.collective = 0
        self.changed_at = time.monotonic()
        if fd is not None:
            os.set_blocking(fd, False)

    def phase(self, name: str, step: int, *, collective: bool = False) -> None:
        """The loop enters a phase; `collective` counts those in which ranks wait for each other."""
        self.phase_name, self.step, self.changed_at = name, step, time.monotonic()
        self.collective += collective
        self._send({"phase": name, "step": step, "collective": self.collective, "t": time.time()})

    def event(self, kind: str, **fields: Any) -> None:
        """Something for the journal; lost if the pipe is full, so it is never the only record."""
        self._send({"event": kind, "t": time.time(), **fields})

    def _send(self, message: dict[str, Any]) -> None:
        if self._fd is None:
            return
        # A full pipe (agent stopped) or a closed one (agent gone; the lifeline ends this rank) must not stall a step.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._fd, json.dumps(message).encode() + b"\n")


class Watchdog:
    """Ends a rank that has no agent when one phase lasts longer than it may."""

    def __init__(self, heartbeat: Heartbeat, *, limit_s: float, start_limit_s: float, log: Log) -> None:
        self._heartbeat, self._log = heartbeat, log
        self._limit_s, self._start_limit_s = limit_s, start_limit_s
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._limit_s / 4)):
            beat = self._heartbeat
            limit_s = self._start_limit_s if beat.phase_name == "start" else self._limit_s
            silent_s = time.monotonic() - beat.changed_at
            if silent_s > limit_s:
                self._log.error("phase took too long", phase=beat.phase_name, step=beat.step, seconds=silent_s)
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                os._exit(ExitCode.FAILED)


def die_with_parent() -> None:
    """Asks Linux to kill this process when the thread that created it ends; the rank calls it itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
