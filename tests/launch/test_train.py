"""`pretrain train` and `resume` with their own Ray: side by side, interrupted, killed; nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.clusters.local import PREFIX
from pretrain.rundir import ProcessIdentity, RunDirectory
from tests.launch.runs import run_cli, start_cli, write_config

pytestmark = pytest.mark.timeout(600)
START_S = 240.0  # Ray alone takes 3 s on two idle cores and fifty times that on crowded ones


def wait_for(what: Callable[[], Any], process: subprocess.Popen[str], timeout_s: float = START_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"did not happen: {process.communicate()}")


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Ends a command that a failed test leaves running, instead of waiting for it."""
    try:
        with process:
            try:
                yield process
            except BaseException:
                process.kill()
                raise
    finally:
        process.kill()


def committed(home: Path, name: str) -> bool:
    return any(event.kind == "committed" for event in RunDirectory.locate(str(home / name)).events())


def ray_folders(pid: int) -> list[Path]:
    found = []
    for folder in Path("/tmp").glob(f"{PREFIX}*"):
        owner = folder / "owner.json"
        if owner.exists() and f'"pid": {pid},' in owner.read_text():
            found.append(folder)
    return found


def test_two_runs_side_by_side_one_with_a_crash_one_interrupted_and_a_second_trainer_refused(tmp_path: Path) -> None:
    home = tmp_path / "home"
    crash = {"attempt": 1, "rank": 1, "step": 12, "do": "signal:9"}
    short = write_config(tmp_path, "short", fake={"steps": 30, "step_s": 0.05, "faults": [crash]})
    long = write_config(tmp_path, "long", fake={"steps": 5000, "step_s": 0.05})
    with start_cli(home, "train", str(long)) as first, start_cli(home, "train", str(short)) as second:
        wait_for(lambda: (home / "long" / "run.yaml").exists() and committed(home, "long"), first)
        refused = run_cli(home, "train", str(long), "--resume", "auto")
        taken = run_cli(home, "train", str(long))
        out, err = second.communicate(timeout=START_S)
        os.killpg(first.pid, signal.SIGINT)  # as a terminal does: to everything in the foreground
        asked_t = time.monotonic()
        first_out, first_err = first.communicate(timeout=START_S)
    assert refused.returncode == 2
    assert f"is held by pid {first.pid}" in refused.stderr
    assert taken.returncode == 2
    assert "exists already" in taken.stderr
    assert "pretrain resume long" in taken.stderr
    assert second.returncode == 0, err
    assert "run short in" in out
    assert "step 30/30" in out
    assert "completed at step 30" in out
    assert "rank 1 on" in err
    assert "signal 9, likely out of memory" in err
    assert first.returncode == 5, first_err
    assert "interrupted; the newest checkpoint is of step" in first_out
    assert "pretrain resume long" in first_out
    assert time.monotonic() - asked_t < 30.0
    assert "Traceback" not in err + first_err + refused.stderr + taken.stderr
    assert ray_folders(first.pid) == ray_folders(second.pid) == []


def test_a_run_that_fails_says_why_and_ends_with_the_code_of_failures(tmp_path: Path) -> None:
    home = tmp_path / "home"
    faults = [{"attempt": attempt, "rank": 1, "step": 7, "do": "raise:2"} for attempt in range(1, 9)]
    config = write_config(tmp_path, "odd", fake={"steps": 30, "step_s": 0.05, "commit_every": 100, "faults": faults})
    failed = run_cli(home, "train", str(config), timeout_s=START_S)
    assert failed.returncode == 3
    assert "the row is odd" in failed.stderr
    assert "Traceback" not in failed.stderr.splitlines()[-1]
    events = RunDirectory.locate(str(home / "odd")).events()
    assert [event.kind for event in events][-1] == "failed"
    assert 2 <= sum(event.kind == "attempt_started" for event in events) < 8  # tried again, and not for ever
    again = run_cli(home, "status", "odd", "--json")
    assert '"state": "failed"' in again.stdout


def test_a_killed_train_leaves_nothing_and_resume_says_what_changed_and_completes(tmp_path: Path) -> None:
    home = tmp_path / "home"
    config = write_config(tmp_path, "run", fake={"steps": 60, "step_s": 0.05})
    with start_cli(home, "train", str(config)) as train:
        wait_for(lambda: (home / "run" / "run.yaml").exists() and committed(home, "run"), train)
        started = psutil.Process(train.pid).children(recursive=True)
        assert ray_folders(train.pid)
        run = RunDirectory.locate(str(home / "run"))
        ranks = [
            ProcessIdentity.from_json(entry)
            for event in run.events()
            if event.kind == "ranks_started"
            for entry in event.fields["processes"]
        ]
        train.kill()
        train.communicate()
    assert {rank.pid for rank in ranks} <= {process.pid for process in started}
    _, alive = psutil.wait_procs(started, timeout=10.0)
    assert alive == []
    assert run.status().state == "lost"
    assert ray_folders(train.pid) == []

    resumed = run_cli(home, "resume", "run", "checkpoint.keep_last=3", timeout_s=START_S)
    assert resumed.returncode == 0, resumed.stderr
    assert "checkpoint.keep_last: 2 -> 3" in resumed.stdout
    assert "completed at step 60" in resumed.stdout
    kinds = [event.kind for event in run.events()]
    assert kinds.count("config_changed") == 1
    assert kinds.count("restored") == 1
    again = run_cli(home, "resume", "run")
    assert again.returncode == 0
    assert "nothing to do" in again.stdout


def test_a_run_goes_on_and_ends_well_when_the_control_service_of_its_ray_dies(tmp_path: Path) -> None:
    home = tmp_path / "home"
    crash = {"attempt": 1, "rank": 1, "step": 60, "do": "signal:9"}
    config = write_config(tmp_path, "run", fake={"steps": 90, "step_s": 0.05, "faults": [crash]})
    with start_cli(home, "train", str(config)) as train:
        wait_for(lambda: (home / "run" / "run.yaml").exists() and committed(home, "run"), train)
        started = psutil.Process(train.pid).children(recursive=True)
        (service,) = [process for process in started if process.name().startswith("gcs_server")]
        service.kill()
        out, err = train.communicate(timeout=START_S)
    assert train.returncode == 0, err
    assert "signal 9" in err  # the ranks were started again without asking Ray for slots
    assert "completed at step 90" in out
    _, alive = psutil.wait_procs(started, timeout=10.0)
    assert alive == []
    assert ray_folders(train.pid) == []
