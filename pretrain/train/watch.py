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
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from pretrain.errors import ExitCode, UserError
from pretrain.log import Log
from pretrain.rundir import this_process

_PR_SET_PDEATHSIG = 1
STACKS_SIGNAL = signal.SIGUSR1  # a rank that gets it writes the stacks of all its threads into its log


@runtime_checkable
class Beat(Protocol):
    """Tells that a phase is entered, or goes on."""

    def __call__(self, phase: str, *, collective: bool = False) -> None:
        """
        Args:
            collective: other ranks are waited for from here on. Who has come so far is not judged while another rank,
                which has not, still waits for its disk.
        """
        ...


class Heartbeat:
    """Phase changes and events of this rank, one JSON object per line.

    Attributes:
        stages: seconds of each stage of the rank's start, in order; complete when its first step is done.
    """

    def __init__(
        self,
        fd: int | None = None,
        *,
        began: float | None = None,
        on_training: Callable[[int, dict[str, float]], None] = lambda step, stages: None,
    ) -> None:
        """
        Args:
            began: monotonic time at which the start began; now if not given.
            on_training: called once, with the step that was done first and the stages.
        """
        self._fd = fd
        self._on_training = on_training
        self._first_step: int | None = None
        self.phase_name = "start"
        self.step = 0
        self.collective = 0
        self.changed_at = time.monotonic()
        self.stages: dict[str, float] = {}
        self._stage_t = self.changed_at if began is None else began
        if fd is not None:
            os.set_blocking(fd, False)

    def stage(self, name: str) -> None:
        """A stage of the start is done."""
        now = time.monotonic()
        self.stages[f"{name}_s"] = round(now - self._stage_t, 4)
        self._stage_t = now

    def phase(self, name: str, step: int, *, collective: bool = False, own_s: float | None = None) -> None:
        """The loop enters a phase; `collective` counts those in which ranks wait for each other.

        Args:
            own_s: seconds of this rank's own work in the step before, without waiting for others.
        """
        if self.phase_name == "start" and name != "start":
            self.stage("restore")
            self._first_step = step
        elif self._first_step is not None and step > self._first_step:
            self._first_step = None
            self.stage("first_step")
            self._on_training(step, self.stages)
        self.phase_name, self.step, self.changed_at = name, step, time.monotonic()
        self.collective += collective
        own = {} if own_s is None else {"own_s": round(own_s, 6)}
        self._send({"phase": name, "step": step, "collective": self.collective, "t": time.time(), **own})

    def go_on(self, phase: str, *, collective: bool = False) -> None:
        """A phase at the step that was told last; a `Beat`."""
        self.phase(phase, self.step, collective=collective)

    def event(self, kind: str, **fields: Any) -> None:
        """Something for the journal; lost if the pipe is full, so it is never the only record."""
        self._send({"event": kind, "t": time.time(), **fields})

    def standby(self, word: str) -> None:
        """A process that is no rank yet says `ready` (all is imported) or `taken` (it is a rank from now on)."""
        self._send({"standby": word})

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
        self._limit_s = limit_s
        self._limits_s = {"start": start_limit_s, "compile": max(limit_s, start_limit_s)}
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._limit_s / 4)):
            beat = self._heartbeat
            limit_s = self._limits_s.get(beat.phase_name, self._limit_s)
            silent_s = time.monotonic() - beat.changed_at
            if silent_s > limit_s:
                self._log.error("phase took too long", phase=beat.phase_name, step=beat.step, seconds=silent_s)
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                os._exit(ExitCode.FAILED)


def answer_stacks() -> None:
    """From now on this process answers `STACKS_SIGNAL`, also while it is stuck inside C code."""
    faulthandler.register(STACKS_SIGNAL, file=sys.stderr, all_threads=True)


def die_with_parent() -> None:
    """Asks Linux to kill this process when the thread that created it ends; the rank calls it itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def process_began() -> float:
    """Monotonic time at which this process was started, within a clock tick; now where nobody tells."""
    now = time.monotonic()
    if sys.platform != "linux":
        return now
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - this_process().start_time / os.sysconf("SC_CLK_TCK")
    return now - max(0.0, age_s)


def descriptor(variable: str) -> int:
    """The file descriptor that an agent named in `variable`. Raises UserError."""
    value = os.environ.get(variable, "")
    if not value.isdigit():
        raise UserError(
            f"{variable}={value!r} is not a file descriptor. --run is how agents start ranks. "
            "To train in this process use python -m pretrain CONFIG."
        )
    return int(value)
