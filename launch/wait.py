"""`pretrain submit --wait`: stays until the submitted run has ended, for schedulers that want a process.

Takes a submitted run → its progress on stdout → the run's exit code. SIGTERM, SIGUSR1 and SIGINT ask the run to
save and end; the exit code is then 5 (resumable), so that a scheduler starts the same command again. Only a second
SIGINT means at once: schedulers repeat their signals. Everything is read from the run's directory; Ray is only asked
whether the driver came up at all.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from types import FrameType
from typing import Any

from launch.progress import Progress
from launch.runs import LOST_FOR_GOOD_S
from pretrain.errors import ExitCode, PretrainError
from pretrain.rundir import RunDirectory
from pretrain.rundir.journal import TERMINAL_KINDS, Event, EventKind
from pretrain.rundir.submission import forget_submission

LOOK_EVERY_S = 0.5
ASK_RAY_EVERY_S = 5.0
SILENT_FOR_GOOD_S = 300.0  # a busy head may not answer for a while
CAUGHT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Asked:
    """Signals of the scheduler become requests to the run."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self.count = 0
        self._interrupts = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Asked:
        self._before = {number: signal.signal(number, self._count) for number in CAUGHT}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self._interrupts += number == signal.SIGINT
        now = self._interrupts > 1
        if self.count == 1 or now:
            with contextlib.suppress(PretrainError):  # a store that fails now
                self._run.request_stop(now=now)


def wait_for_end(run: RunDirectory, client: Any, submission: str, *, newer_than: int) -> int:
    """Waits for the end of a run that was just submitted; gives the exit code.

    Args:
        client: of Ray's Jobs API.
        newer_than: number of the run's newest lease before it was submitted; what older ones wrote is past.
    """
    attempt, asked_ray_t, answered_t, gone_since_t = 0, time.monotonic(), time.monotonic(), None
    with Asked(run) as asked:
        progress = Progress(run, run.config().schedule.total_steps)
        while True:
            events = [event for event in _events(run) if event.lease > newer_than]
            attempt = max((int(event.fields.get("attempt", 0)) for event in events), default=attempt)
            if attempt:
                progress.show(attempt)
            if events and events[-1].kind in TERMINAL_KINDS:
                if attempt:
                    progress.show(attempt, last=True)
                return _end(run, events[-1], asked.count > 0)
            now = time.monotonic()
            if now - asked_ray_t > ASK_RAY_EVERY_S:
                asked_ray_t = now
                answers, end = (True, None) if events else _driver_end(client, submission)
                answered_t = now if answers else answered_t
                if end is not None:
                    with contextlib.suppress(PretrainError):  # the error that counts is the driver's
                        forget_submission(run.store)
                    print(f"error: the run's driver ended before it began: {end[1]}", file=sys.stderr)
                    return end[0]
                if now - answered_t > SILENT_FOR_GOOD_S:
                    print(
                        f"error: Ray has been silent for {SILENT_FOR_GOOD_S:.0f} s and the run's driver has not begun. "
                        "Its head is gone or cannot be reached. The same command with --resume auto starts the run.",
                        file=sys.stderr,
                    )
                    return int(ExitCode.FAILED)
                lost = bool(events) and _is_lost(run)
                gone_since_t = (gone_since_t or now) if lost else None
                if gone_since_t is not None and now - gone_since_t > LOST_FOR_GOOD_S:
                    print(f"error: run {run.name} died without a last word, its keeper too", file=sys.stderr)
                    return int(ExitCode.FAILED)
            time.sleep(LOOK_EVERY_S)


def _events(run: RunDirectory) -> list[Event]:
    with contextlib.suppress(PretrainError):  # what cannot be read now is read at the next look
        return run.events()
    return []


def _is_lost(run: RunDirectory) -> bool:
    with contextlib.suppress(PretrainError):
        return run.status().state == "lost"
    return False


def _driver_end(client: Any, submission: str) -> tuple[bool, tuple[int, str] | None]:
    """Whether Ray answers; exit code and message of a driver that never opened the journal, None while it may still."""
    try:
        info = client.get_job_info(submission)
    except Exception:  # Ray raises many kinds
        return False, None
    if not info.status.is_terminal():
        return True, None
    lines = (info.message or "").strip().splitlines() or [str(info.status)]
    return True, (int(info.driver_exit_code or ExitCode.FAILED), lines[-1])


def _end(run: RunDirectory, event: Event, asked: bool) -> int:
    step = event.fields.get("step")
    at = f" at step {step}" if step is not None else ""
    match event.kind:
        case EventKind.COMPLETED:
            print(f"completed{at}")
            return int(ExitCode.DONE)
        case EventKind.STOPPED if not asked:
            print(f"stopped{at} on request. Go on with: pretrain resume {run.name}")
            return int(ExitCode.STOPPED)
        case EventKind.STOPPED | EventKind.INTERRUPTED:
            print(f"interrupted{at}; the same command with --resume auto goes on")
            return int(ExitCode.INTERRUPTED)
        case _:
            print(f"error: run {run.name} failed: {event.fields.get('reason')}", file=sys.stderr)
            return int(event.fields.get("exit_code") or ExitCode.FAILED)
