"""`pretrain submit --wait`: the exit code that a scheduler sees, and what its signals do. Runs made by hand, no Ray."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch import wait
from pretrain.rundir import EventKind, Lease, RunDirectory
from pretrain.rundir.submission import write_submission
from tests.launch.runs import config_for


class Client:
    """Of Ray's Jobs API: the driver runs, or has ended with a code."""

    def __init__(self, exit_code: int | None = None) -> None:
        self._exit_code = exit_code

    def get_job_info(self, submission: str) -> Any:
        ended = self._exit_code is not None
        status = SimpleNamespace(is_terminal=lambda: ended)
        return SimpleNamespace(status=status, driver_exit_code=self._exit_code, message="first\nerror: no such data")


def claimed(folder: Path) -> RunDirectory:
    run, _ = RunDirectory.claim(config_for(folder, fake={"steps": 9}), resume="never", home=str(folder / "home"))
    return run


def held(run: RunDirectory, *events: tuple[EventKind, dict[str, Any]]) -> Lease:
    lease = Lease.acquire(run.store, purpose="test")
    journal = run.journal(lease)
    for kind, fields in events:
        journal.append(kind, **fields)
    return lease


def until_caught(number: int) -> None:
    """The handler is in place: before, the signal would end the tests."""
    while signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
        time.sleep(0.02)


def later(action: Callable[[], object], seconds: float = 0.6) -> threading.Thread:
    thread = threading.Thread(target=lambda: (time.sleep(seconds), action()))
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("kind", "fields", "code", "text"),
    [
        (EventKind.COMPLETED, {"step": 9}, 0, "completed at step 9"),
        (EventKind.STOPPED, {"step": 5}, 4, "stopped at step 5 on request"),
        (EventKind.INTERRUPTED, {"step": 5}, 5, "interrupted at step 5"),
        (EventKind.FAILED, {"reason": "a crash loop", "exit_code": 3}, 3, "failed: a crash loop"),
        (EventKind.FAILED, {"reason": "bad config", "exit_code": 2}, 2, "failed: bad config"),
    ],
)
def test_the_exit_code_is_that_of_the_run(
    kind: EventKind, fields: dict[str, Any], code: int, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = claimed(tmp_path)
    held(run, (EventKind.STOPPED, {"step": 1})).release()  # an earlier end is past
    lease = held(run, (EventKind.ATTEMPT_STARTED, {"attempt": 1, "ranks": 1, "host": "h", "why": "start"}))
    thread = later(lambda: run.journal(lease).append(kind, **fields))
    assert wait.wait_for_end(run, Client(), "job", newer_than=lease.number - 1) == code
    thread.join()
    lease.release()
    captured = capsys.readouterr()
    assert text in captured.out + captured.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_schedulers_signal_asks_for_a_save_and_the_end_is_resumable(number: int, tmp_path: Path) -> None:
    run = claimed(tmp_path)
    lease = held(run, (EventKind.ATTEMPT_STARTED, {"attempt": 1, "ranks": 1, "host": "h", "why": "start"}))
    asked: list[list[bool]] = []

    def as_a_scheduler_does() -> None:
        until_caught(number)
        for _ in range(3):  # they repeat themselves
            os.kill(os.getpid(), number)
            time.sleep(0.2)
        asked.append([request.now for request in run.pending_requests()])
        run.journal(lease).append(EventKind.STOPPED, step=5)

    before = signal.getsignal(number)
    thread = later(as_a_scheduler_does)
    assert wait.wait_for_end(run, Client(), "job", newer_than=0) == 5
    thread.join()
    lease.release()
    assert asked == [[False]]
    assert signal.getsignal(number) == before


def test_a_second_ctrl_c_means_at_once(tmp_path: Path) -> None:
    run = claimed(tmp_path)
    lease = held(run, (EventKind.ATTEMPT_STARTED, {"attempt": 1, "ranks": 1, "host": "h", "why": "start"}))

    def twice() -> None:
        until_caught(signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        run.journal(lease).append(EventKind.INTERRUPTED, step=5)

    thread = later(twice)
    assert wait.wait_for_end(run, Client(), "job", newer_than=0) == 5
    thread.join()
    lease.release()
    assert [request.now for request in run.pending_requests()] == [False, True]


def test_a_driver_that_never_began_gives_its_own_code_and_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wait, "ASK_RAY_EVERY_S", 0.1)
    run = claimed(tmp_path)
    held(run, (EventKind.STOPPED, {"step": 1})).release()
    write_submission(run.store, "job", lease=1)
    assert run.status().state == "restarting"
    assert wait.wait_for_end(run, Client(exit_code=2), "job", newer_than=1) == 2
    assert "ended before it began: error: no such data" in capsys.readouterr().err
    assert run.status().state == "stopped"  # as before: nobody trains it


def test_a_head_that_is_gone_before_the_driver_began_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Gone:
        def get_job_info(self, submission: str) -> Any:
            raise ConnectionError("refused")

    monkeypatch.setattr(wait, "ASK_RAY_EVERY_S", 0.1)
    monkeypatch.setattr(wait, "SILENT_FOR_GOOD_S", 0.5)
    assert wait.wait_for_end(claimed(tmp_path), Gone(), "job", newer_than=0) == 3
    assert "Its head is gone or cannot be reached" in capsys.readouterr().err


def test_a_run_that_died_with_its_keeper_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wait, "ASK_RAY_EVERY_S", 0.1)
    monkeypatch.setattr(wait, "LOST_FOR_GOOD_S", 0.5)
    run = claimed(tmp_path)
    held(run, (EventKind.ATTEMPT_STARTED, {"attempt": 1, "ranks": 1, "host": "h", "why": "start"})).release()
    assert wait.wait_for_end(run, Client(), "job", newer_than=0) == 3
    assert "died without a last word" in capsys.readouterr().err
