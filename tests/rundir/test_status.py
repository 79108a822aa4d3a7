"""What `status` says of a run in each state it can be in."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pretrain.rundir import DamagedFileError, JournalWriter, Lease, RunDirectory, this_process
from pretrain.rundir.lease_file import lease_key
from pretrain.rundir.submission import forget_submission, write_submission
from tests.rundir.helpers import ELSEWHERE, flip_bits, gone_process, new_run, put_lease


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return new_run(tmp_path)


def start(run: RunDirectory, attempt: int = 1) -> tuple[Lease, JournalWriter]:
    lease = Lease.acquire(run.store, purpose="training")
    journal = run.journal(lease)
    if attempt == 1:
        journal.append("created")
    journal.append("attempt_started", attempt=attempt, ranks=2, host="here", why="start")
    return lease, journal


def log(run: RunDirectory, attempt: int, *records: dict[str, object], tail: bytes = b"") -> None:
    lines = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    run.store.append(run.metrics_key(attempt), lines + tail)


def test_a_new_run_is_created(run: RunDirectory) -> None:
    status = run.status()
    assert (status.name, status.state, status.step, status.total_steps) == ("tiny", "created", 0, 10)
    assert (status.attempt, status.loss, status.last_checkpoint, status.updated_at) == (0, None, None, None)


def test_a_living_run_shows_step_loss_speed_and_checkpoint(run: RunDirectory) -> None:
    lease, journal = start(run)
    assert (run.status().state, run.status().attempt, run.status().step) == ("running", 1, 0)
    log(
        run,
        1,
        {"t": 5.0, "step": 3, "loss": 4.5, "tokens_per_second": 100.0},
        {"t": 6.0, "step": 4, "loss": 4.25, "tokens_per_second": 120.0},
        {"t": 7.0, "step": 4, "validation": {"prose": {"loss": 9.0}}},
        tail=b'{"t": 8.0, "step": 5, "lo',  # killed in the middle of a line
    )
    journal.append("committed", attempt=1, step=3, checkpoint="step-00000003-a001")
    status = run.status()
    assert (status.state, status.step, status.loss, status.tokens_per_second) == ("running", 4, 4.25, 120.0)
    assert status.last_checkpoint == "step-00000003-a001"
    assert status.reason is None
    assert abs(time.time() - (status.updated_at or 0)) < 5
    assert json.loads(json.dumps(status.to_json()))["state"] == "running"
    lease.release()


def test_between_two_attempts_it_is_restarting_with_the_fault_and_goes_on_from_the_restored_step(
    run: RunDirectory,
) -> None:
    lease, journal = start(run)
    log(run, 1, {"t": 5.0, "step": 7, "loss": 4.0})
    journal.append("committed", attempt=1, step=5, checkpoint="step-00000005-a001")
    journal.append("fault", attempt=1, cause="signal", rank=1, exit_code=-9, message="rank 1 was killed by signal 9")
    assert (run.status().state, run.status().reason) == ("restarting", "rank 1 was killed by signal 9")
    journal.append("attempt_ended", attempt=1, outcome="fault")
    assert run.status().state == "restarting"
    assert run.status().step == 7
    journal.append("attempt_started", attempt=2, ranks=2, host="here", why="fault")
    journal.append("restored", attempt=2, checkpoint="step-00000005-a001", step=5)
    status = run.status()
    assert (status.state, status.attempt, status.step, status.reason) == ("running", 2, 5, None)
    assert (status.loss, status.last_checkpoint) == (None, "step-00000005-a001")
    log(run, 2, {"t": 9.0, "step": 6, "loss": 3.5})
    assert (run.status().step, run.status().loss) == (6, 3.5)
    lease.release()


ENDS = [
    ("completed", {"step": 10}, "completed", None),
    ("stopped", {"step": 6}, "stopped", None),
    ("interrupted", {"step": 6}, "interrupted", None),
    (
        "failed",
        {"reason": "10 steps in a row were skipped", "exit_code": 3},
        "failed",
        "10 steps in a row were skipped",
    ),
]


@pytest.mark.parametrize(("kind", "fields", "state", "reason"), ENDS, ids=[end[0] for end in ENDS])
def test_the_last_word_of_a_run_is_its_state(
    run: RunDirectory, kind: str, fields: dict[str, object], state: str, reason: str | None
) -> None:
    lease, journal = start(run)
    log(run, 1, {"t": 5.0, "step": 6, "loss": 4.0})
    journal.append(kind, **fields)
    for _ in range(2):  # before and after it gives the lease back
        status = run.status()
        assert (status.state, status.reason) == (state, reason)
        assert status.step == fields.get("step", 6)
        lease.release()


def test_an_ended_run_that_somebody_takes_up_again_is_restarting_and_then_running(run: RunDirectory) -> None:
    lease, journal = start(run)
    journal.append("stopped", step=6)
    lease.release()
    lease = Lease.acquire(run.store, purpose="resume")
    assert (run.status().state, run.status().step) == ("restarting", 6)
    run.journal(lease).append("attempt_started", attempt=2, ranks=2, host="here", why="resume")
    assert run.status().state == "running"
    lease.release()


@pytest.mark.parametrize("ended", ["stopped", "completed", "failed", "interrupted", "lost", "created"])
def test_a_run_that_was_submitted_is_alive_until_its_driver_has_begun(run: RunDirectory, ended: str) -> None:
    number = 0
    if ended != "created":
        lease, journal = start(run)
        number = lease.number
        if ended != "lost":
            journal.append(ended, step=6, reason="r", exit_code=3)
        lease.release()
    before = time.time()
    assert run.status().state == ended
    write_submission(run.store, "pretrain-tiny-17", lease=number)
    status = run.status()
    assert status.state == ("created" if ended == "created" else "restarting")
    assert status.reason == "Ray job pretrain-tiny-17 has not begun to train it"
    assert before <= float(status.updated_at or 0) <= time.time()
    lease = Lease.acquire(run.store, purpose="pretrain submit")  # of the driver, or of anyone
    assert "pretrain submit, pid" in str(run.status().reason)
    run.journal(lease).append("stopped", step=6)
    lease.release()
    assert run.status().state == "stopped"  # although the file is still there


def test_a_run_that_is_held_is_its_holders_whoever_submits_it_over_again(run: RunDirectory) -> None:
    lease, _ = start(run)
    write_submission(run.store, "job", lease=lease.number)
    assert run.status().state == "running"
    lease.release()
    assert run.status().state == "restarting"
    forget_submission(run.store)
    forget_submission(run.store)
    assert run.status().state == "lost"


def test_a_damaged_submission_is_told_with_its_file(run: RunDirectory) -> None:
    write_submission(run.store, "job", lease=0)
    path = Path(run.url) / "control" / "submitted.json"
    path.write_bytes(flip_bits(path)[300])
    with pytest.raises(DamagedFileError, match=r"submitted\.json.*Delete that file"):
        run.status()


KILLED = """
import sys, time
from pretrain.rundir import Lease, RunDirectory
run = RunDirectory.locate(sys.argv[1])
lease = Lease.acquire(run.store, purpose="training")
run.journal(lease).append("attempt_started", attempt=1, ranks=1, host="here", why="start")
print("running", flush=True)
time.sleep(60)
"""


def test_a_run_whose_process_was_killed_is_lost_at_once(run: RunDirectory) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, run.url], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    assert run.status().state == "running"
    process.kill()
    process.communicate(timeout=5)
    status = run.status()
    assert status.state == "lost"
    assert status.reason == (
        f"pid {process.pid} on {this_process().host} is gone without a last word; go on with pretrain resume"
    )


def test_a_run_on_another_host_is_lost_after_30_s_of_silence(run: RunDirectory) -> None:
    lease, _ = start(run)
    lease.release()
    put_lease(run.store, ELSEWHERE, renewed_at=time.time() - 20)
    assert run.status().state == "running"
    put_lease(run.store, ELSEWHERE, renewed_at=time.time() - 40)
    assert run.status().state == "lost"
    assert "node7" in str(run.status().reason)


def test_a_run_whose_starter_died_before_its_first_word_is_lost(run: RunDirectory) -> None:
    put_lease(run.store, gone_process(), time.time())
    assert run.status().state == "lost"


def test_the_tail_of_a_long_metrics_file_is_enough(run: RunDirectory) -> None:
    lease, _ = start(run)
    log(run, 1, *({"t": 1.0, "step": step, "loss": float(step), "note": "x" * 200} for step in range(2000)))
    assert (run.status().step, run.status().loss) == (1999, 1999.0)
    lease.release()


def test_a_loss_that_is_not_finite_does_not_break_the_status(run: RunDirectory) -> None:
    lease, _ = start(run)
    log(run, 1, {"t": 1.0, "step": 1, "loss": float("nan")}, {"t": 2.0, "step": 2, "loss": None})
    status = run.status()
    assert (status.step, status.loss) == (2, None)
    lease.release()


@pytest.mark.parametrize("key", ["run.yaml", "journal/000001/00000001.json", lease_key(1)])
def test_a_damaged_file_is_named(run: RunDirectory, key: str) -> None:
    lease, _ = start(run)
    lease.release()
    path = Path(run.url) / key
    path.write_bytes(flip_bits(path)[700])
    with pytest.raises(DamagedFileError, match=rf"^{path} is damaged"):
        run.status()


def test_reading_the_status_writes_nothing(run: RunDirectory) -> None:
    lease, _ = start(run)
    lease.release()
    before = {key: os.stat(Path(run.url) / key).st_mtime_ns for key in run.store.list()}
    run.status()
    assert {key: os.stat(Path(run.url) / key).st_mtime_ns for key in run.store.list()} == before


def test_statuses_are_values(run: RunDirectory) -> None:
    assert dataclasses.replace(run.status(), step=3).step == 3
    assert run.status() == run.status()


def test_the_import_is_light() -> None:
    script = (
        "import sys, pretrain.rundir\n"
        "print(sorted({'torch', 'ray', 'deepspeed', 'fsspec', 'numpy', 'psutil'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20)
    assert run.stdout == "[]\n"
