"""Why a rank should stop: collected from signals, the agent's lifeline and the run's control files.

Sources only raise a flag; the loop reads it once per step and all ranks agree on it in the step's
early all-reduce, so every rank leaves after the same step with the same state saved.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from types import FrameType

from pretrain.errors import ExitCode
from pretrain.log import Log

CONTROL_POLL_S = 0.5


class StopReason(IntEnum):
    """What the loop does at the next step boundary; a larger value wins when ranks disagree."""

    NONE = 0
    INTERRUPT = 1  # a signal or a draining node: save, exit 5, resumable
    STOP = 2  # asked for by a person: save, exit 4


class StopFlag:
    """The strongest reason seen so far on this rank."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._reason = StopReason.NONE
        self._untold: list[tuple[StopReason, str]] = []
        self._closed = threading.Event()

    @property
    def reason(self) -> StopReason:
        """The strongest reason so far; the loop's look at it also logs what is new."""
        while self._untold:
            reason, source = self._untold.pop(0)
            self._log.info("asked to end after this step", reason=reason.name.lower(), source=source)
        return self._reason

    def ask(self, reason: StopReason, source: str) -> None:
        """Raises the flag; asking again with the same or a weaker reason changes nothing.

        Writes nothing: a signal handler runs in the middle of anything, also of a write to the same stream.
        """
        if reason > self._reason:
            self._reason = reason
            self._untold.append((reason, source))

    def close(self) -> None:
        self._closed.set()

    def watch_signals(self) -> None:
        """SIGTERM and SIGINT become INTERRUPT. Main thread only."""

        def ask(number: int, _frame: FrameType | None) -> None:
            self.ask(StopReason.INTERRUPT, signal.Signals(number).name)

        signal.signal(signal.SIGTERM, ask)
        signal.signal(signal.SIGINT, ask)

    def watch_lifeline(self, fd: int) -> None:
        """Reads the agent's words from `fd`; its end means that the agent is gone, and so is this rank.

        The exit is immediate: without an agent nobody may train, and the loop could be stuck in a
        collective for as long as its timeout.
        """

        def read() -> None:
            with os.fdopen(fd) as words:
                for word in words:
                    if word.strip() == "stop":
                        self.ask(StopReason.STOP, "controller")
                    elif word.strip() == "drain":
                        self.ask(StopReason.INTERRUPT, "controller")
            if not self._closed.is_set():
                self._log.error("the agent is gone; this rank ends")
                os._exit(ExitCode.FENCED)

        threading.Thread(target=read, name="lifeline", daemon=True).start()

    def watch_clock(self, limit_s: float) -> None:
        """After so many seconds the run saves and ends; for rank 0 of a run without a controller."""

        def wait() -> None:
            if not self._closed.wait(limit_s):
                self.ask(StopReason.INTERRUPT, f"cluster.time_limit_s={limit_s:g}")

        threading.Thread(target=wait, name="time limit", daemon=True).start()

    def watch_requests(self, pending: Callable[[], Sequence[object]]) -> None:
        """Polls the run's control requests; for rank 0 of a run without a controller."""

        def poll() -> None:
            while not self._closed.wait(CONTROL_POLL_S):
                try:
                    if pending():
                        self.ask(StopReason.STOP, "control request")
                        return
                except Exception as error:  # a store hiccup must not end training; the next poll tries again
                    self._log.warning("control requests could not be read", error=error)

        threading.Thread(target=poll, name="control", daemon=True).start()
