"""Kills need evidence: a process that ended by itself is never taken for one that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.trial import TrialRun
from pretrain.errors import PretrainError, UserError
from pretrain.metrics import JsonlSink
from pretrain.rundir import EventKind, Lease
from pretrain.rundir.process import identify_process


def _trial(tmp_path: Path, program: str, stall_s: float = 20.0) -> TrialRun:
    """A trial whose `pretrain train` is some other program."""
    trial = TrialRun(tmp_path, "killed", stall_s=stall_s)
    (tmp_path / "killed.log").write_text("the last words\n")
    trial._process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    return trial


def _record(trial: TrialRun, attempt: int, steps: range) -> None:
    sink = JsonlSink(trial.directory.store, trial.directory.metrics_key(attempt))
    for step in steps:
        sink.write({"step": step})


def test_a_kill_of_the_process_is_proved_by_its_return_code(tmp_path: Path) -> None:
    trial = _trial(tmp_path, "import time; time.sleep(600)")
    assert "returned -9" in trial.kill_train()


def test_a_process_that_ended_by_itself_was_not_killed(tmp_path: Path) -> None:
    trial = _trial(tmp_path, "pass")
    assert trial._process is not None
    trial._process.wait()
    with pytest.raises(PretrainError, match=r"exit code 0 before the kill fired.*\n.*\n?the last words"):
        trial.kill_train()


def test_waiting_for_a_step_sees_later_attempts_only_and_the_end_of_the_run(tmp_path: Path) -> None:
    trial = _trial(tmp_path, "import time; time.sleep(600)")
    try:
        _record(trial, 1, range(1, 9))
        assert trial.await_step(5) == (1, 8)
        _record(trial, 2, range(6, 8))
        assert trial.await_step(5, after_attempt=1) == (2, 7)
        trial._stall_s = 0.2
        with pytest.raises(PretrainError, match="has made no step for"):
            trial.await_step(1, after_attempt=2)
    finally:
        trial.kill_train()
    with pytest.raises(PretrainError, match="before step 9"):
        trial.await_step(9)


@pytest.mark.parametrize(("code", "kind"), [(2, UserError), (3, PretrainError)])
def test_a_run_that_fails_ends_the_proof_with_its_last_words(tmp_path: Path, code: int, kind: type) -> None:
    trial = _trial(tmp_path, f"raise SystemExit({code})")
    with pytest.raises(kind, match=f"exit code {code}") as caught:
        trial.await_end()
    assert type(caught.value) is kind
    assert "the last words" in str(caught.value)


@pytest.mark.parametrize("exit_code", [-signal.SIGKILL, 3])
def test_a_kill_of_a_rank_is_proved_by_the_journal(tmp_path: Path, exit_code: int) -> None:
    trial = TrialRun(tmp_path, "killed", stall_s=20)
    lease = Lease.acquire(trial.directory.store, purpose="test")
    journal = trial.directory.journal(lease)
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    identity = identify_process(rank.pid)
    journal.append(EventKind.RANKS_STARTED, attempt=4, processes=[{**identity.to_json(), "rank": 1}])
    journal.append(EventKind.FAULT, attempt=4, cause="application", rank=1, exit_code=exit_code, message="")
    try:
        if exit_code == 3:  # it had failed by itself just before
            with pytest.raises(PretrainError, match="did not fire: the journal says exit code 3"):
                trial.kill_rank(4, 1)
        else:
            assert trial.kill_rank(4, 1) == (rank.pid, "the journal has a fault with exit code -9")
            assert rank.wait() == -signal.SIGKILL
    finally:
        rank.kill()
        rank.wait()
        lease.release()
    with pytest.raises(PretrainError, match="had ended"):
        trial.kill_rank(4, 1)
    with pytest.raises(PretrainError, match="names no process of rank 0"):
        trial.kill_rank(4, 0)


def test_closing_a_trial_ends_its_process_and_its_ranks(tmp_path: Path) -> None:
    trial = _trial(tmp_path, "import time; time.sleep(600)")  # SIGINT ends it, as Ctrl-C ends pretrain train
    lease = Lease.acquire(trial.directory.store, purpose="test")
    orphan = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True, env=os.environ
    )
    identity = identify_process(orphan.pid)
    trial.directory.journal(lease).append(
        EventKind.RANKS_STARTED, attempt=1, processes=[{**identity.to_json(), "rank": 0}]
    )
    lease.release()
    orphan.send_signal(signal.SIGTERM)  # ends within the grace, as ranks do whose agent is gone
    start = time.monotonic()
    trial.close()
    assert time.monotonic() - start < 15
    assert trial._process is not None
    assert trial._process.poll() is not None
    assert orphan.wait(timeout=1) != 0
