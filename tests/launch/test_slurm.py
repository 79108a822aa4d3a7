"""The rendered sbatch script on a real Slurm: signals, requeue, preemption, and the same weights in the end."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from pretrain.rundir import RunDirectory
from tests.launch.planted import command_lines_with
from tests.launch.runs import RANK_COMMAND, ROOT, run_cli, write_config
from tests.launch.slurm import Slurm, missing_programs, slurm
from tests.missing import did_not_run
from tests.tiny import build_tiny

pytestmark = pytest.mark.timeout(900)
WAIT_S = 300.0


@contextmanager
def real_slurm(num_nodes: int) -> Iterator[Slurm]:
    missing = missing_programs()
    if missing or os.getuid() != 0:
        did_not_run(
            f"{missing or 'root'} is missing: tests/system_packages installs Slurm where this is root on Debian"
        )
    with slurm(num_nodes) as running:
        yield running


def wait_for(what: Callable[[], Any], running: Slurm, log: Path) -> Any:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.2)
    ray_logs = "\n".join(f"{path}: {path.read_text()[-500:]}" for path in Path("/tmp").glob("pretrain-*/ray-*.log"))
    raise AssertionError(f"did not happen\n{log.read_text() if log.exists() else ''}\n{ray_logs}")


def setup_line() -> str:
    """What a site's `module load` would do."""
    return f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT}"


def nodes(home: Path, *, ranks: int, **more: Any) -> dict[str, Any]:
    base = {"ranks": ranks, "cpus": 1, "memory": "1GiB", "home": str(home), "setup": [setup_line()]}
    return {**base, **more}


@contextmanager
def strangers_on(*ports: int) -> Iterator[None]:
    """Programs of others that listen there."""
    with ExitStack() as stack:
        for port in ports:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        yield


def token_of(job: int) -> str:
    """What only the environments of a job's processes may hold, from that of Ray's head."""
    programs = [(one, " ".join(one.info["cmdline"] or [])) for one in psutil.process_iter(["cmdline"])]
    heads = [process for process, line in programs if "gcs_server" in line.split(" ", 1)[0]]
    (head,) = [one for one in heads if one.environ().get("TMPDIR") == f"/tmp/pretrain-{job}"]
    token = head.environ()["RAY_AUTH_TOKEN"]
    assert len(token) == 64
    return token


def kinds(run: RunDirectory) -> list[str]:
    return [event.kind for event in run.events()]


def test_a_job_saves_on_its_warning_signal_goes_back_into_the_queue_and_goes_on(tmp_path: Path) -> None:
    home = tmp_path / "home"
    ranks = f"export PRETRAIN_RANK_COMMAND={shlex.quote(json.dumps(RANK_COMMAND))}"
    config = write_config(
        tmp_path,
        "queued",
        fake={"steps": 200, "step_s": 0.05},
        nodes=nodes(home, ranks=2, setup=[setup_line(), ranks]),
        slurm={"time_limit_s": "10m", "grace_s": 60, "exclusive": False},
    )
    script = tmp_path / "job.sbatch"
    rendered = run_cli(home, "cluster", "render", "slurm", str(config), "--out", str(script))
    assert rendered.returncode == 0, rendered.stderr
    before = set(Path("/tmp").glob("pymp-*"))
    with real_slurm(1) as running, strangers_on(20020, 20047):
        number = running.submit(script)
        assert number == 1
        log = tmp_path / f"queued-{number}.log"
        wait_for(lambda: (home / "queued" / "fake.step").exists(), running, log)
        run = RunDirectory.locate(str(home / "queued"))
        token = token_of(number)
        assert command_lines_with([token]) == []
        running.run("scancel", "--signal=USR1", "--batch", str(number))  # as Slurm does before the time limit
        wait_for(lambda: "stopped" in kinds(run), running, log)
        saved = int((home / "queued" / "fake.step").read_text())
        wait_for(lambda: running.job(number)["JobState"] == "COMPLETED", running, log)
        assert running.job(number)["Restarts"] == "1"
    text = log.read_text()
    assert text.count(":20060\n") == 2  # the job's own ports are taken, and one of the next twenty
    assert "USR1: saving, then back into the queue" in text
    assert "the run ended with code 5" in text
    assert "the run ended with code 0" in text
    assert saved < 200
    events = run.events()
    assert [event.kind for event in events if event.kind in ("stopped", "completed")] == ["stopped", "completed"]
    assert [event.fields["step"] for event in events if event.kind == "restored"] == [saved]
    assert (home / "queued" / "fake.step").read_text() == "200"
    assert list(Path("/tmp").glob(f"pretrain-{number}")) == []
    living = Path("/proc/net/unix").read_text()  # those of tests beside this one
    # Where Ray's dashboard leaves something.
    assert [path for path in Path("/tmp").glob("pymp-*") if path not in before and str(path) not in living] == []
    logs = "".join(path.read_text(errors="replace") for path in (home / "queued").rglob("*") if path.is_file())
    assert token not in text + logs


def fake_job(folder: Path, name: str, *, num_nodes: int, steps: int, **cluster: Any) -> Path:
    """The rendered script of a run whose ranks train nothing, one on each node."""
    home = folder / "home"
    ranks = f"export PRETRAIN_RANK_COMMAND={shlex.quote(json.dumps(RANK_COMMAND))}"
    config = write_config(
        folder, name, fake={"steps": steps, "step_s": 0.05}, num_ranks=num_nodes,
        nodes=nodes(home, ranks=1, setup=[setup_line(), ranks]),
        slurm={"time_limit_s": "20m", "grace_s": 60, "exclusive": False}, **cluster,
    )  # fmt: skip
    script = folder / f"{name}.sbatch"
    rendered = run_cli(home, "cluster", "render", "slurm", str(config), "--out", str(script))
    assert rendered.returncode == 0, rendered.stderr
    return script


def begun(running: Slurm, script: Path, name: str) -> tuple[int, Path, RunDirectory]:
    """Submits a script and waits until its run has committed something: the job's number, its log and the run."""
    number, home = running.submit(script), script.parent / "home"
    log = script.parent / f"{name}-{number}.log"
    wait_for(lambda: (home / name / "run.yaml").exists(), running, log)
    run = RunDirectory.locate(str(home / name))
    wait_for(lambda: "committed" in kinds(run), running, log)
    return number, log, run


@pytest.mark.slow
def test_a_cancelled_job_leaves_no_process_and_its_script_goes_on_in_another_job(tmp_path: Path) -> None:
    home = tmp_path / "home"
    script = fake_job(tmp_path, "cancelled", num_nodes=1, steps=300)
    with real_slurm(1) as running:
        number, log, run = begun(running, script, "cancelled")
        running.run("scancel", str(number))  # no warning, no signal named
        wait_for(lambda: running.job(number)["JobState"] == "CANCELLED", running, log)
        wait_for(lambda: not running.processes(), running, log)
        reached = int((home / "cancelled" / "fake.step").read_text())
        assert reached < 300
        assert kinds(run)[-1] in ("interrupted", "stopped"), log.read_text()  # TERM made it save
        again = running.submit(script)
        wait_for(lambda: running.job(again)["JobState"] == "COMPLETED", running, tmp_path / f"cancelled-{again}.log")
    restored = [event.fields["step"] for event in run.events() if event.kind == "restored"]
    assert len(restored) == 1
    assert 0 < restored[0] <= reached
    assert (home / "cancelled" / "fake.step").read_text() == "300"
    assert kinds(run)[-1] == "completed"


@pytest.mark.slow
def test_a_node_that_loses_power_sends_the_job_back_and_it_goes_on_once_there_are_two_again(tmp_path: Path) -> None:
    script = fake_job(tmp_path, "dark", num_nodes=2, steps=300)
    with real_slurm(2) as running:
        number, log, run = begun(running, script, "dark")
        running.lose_power("n2")
        wait_for(lambda: running.job(number)["JobState"] == "PENDING", running, log)  # there is one node of two
        wait_for(lambda: not running.processes(), running, log)
        running.boot("n2")
        wait_for(lambda: running.job(number)["JobState"] == "COMPLETED", running, log)
        assert running.job(number)["Restarts"] == "1"
    starts = [event.fields["ranks"] for event in run.events() if event.kind == "attempt_started"]
    assert set(starts) == {2}
    assert len(starts) >= 2
    assert kinds(run).count("restored") == len(starts) - 1
    assert kinds(run)[-1] == "completed"


@pytest.mark.slow
def test_training_on_two_nodes_requeued_and_preempted_ends_with_the_weights_of_one_left_alone(tmp_path: Path) -> None:
    """USR1 before the limit, then a job of higher priority: both save, come back and end bit for bit as if alone."""
    home = tmp_path / "home"
    tiny = build_tiny(tmp_path)
    body = {
        "extends": tiny.decoder()[0],
        "tokenizer": str(tiny.tokenizer),
        "data": {"sources": {"text": {"path": str(tmp_path / "text" / "train")}}},
        "schedule": {"total_steps": 600},
        "checkpoint": {"every_steps": 100},
        "cluster": {
            "num_ranks": 2,
            "nodes": nodes(home, ranks=1),
            "slurm": {"time_limit_s": "20m", "grace_s": 60, "partition": "main", "exclusive": False},
        },
    }
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(body))
    script = tmp_path / "job.sbatch"
    rendered = run_cli(home, "cluster", "render", "slurm", str(config), "name=torn", "--out", str(script))
    assert rendered.returncode == 0, rendered.stderr
    environment = {**os.environ, "PRETRAIN_HOME": str(home), "PYTHONPATH": str(ROOT)}
    environment.pop("PRETRAIN_RANK_COMMAND", None)
    with real_slurm(2) as running:
        number, log, run = begun(running, script, "torn")
        running.run("scancel", "--signal=USR1", "--batch", str(number))
        wait_for(lambda: kinds(run).count("restored") == 1, running, log)
        urgent = tmp_path / "urgent.sh"
        urgent.write_text("#!/bin/bash\nsleep 1\n")
        high = running.submit(urgent, "--partition=high", "--nodes=2", "--cpus-per-task=2", "--exclusive")
        wait_for(lambda: running.job(high)["JobState"] == "COMPLETED", running, log)
        wait_for(lambda: running.job(number)["JobState"] == "COMPLETED", running, log)
        assert int(running.job(number)["Restarts"]) >= 2
    starts = [event for event in run.events() if event.kind == "attempt_started"]
    assert all(event.fields["ranks"] == 2 for event in starts)
    assert kinds(run).count("stopped") == 2, log.read_text()  # each time it saved before it went
    assert kinds(run)[-1] == "completed"
    calm = run_cli_real(environment, "train", str(config), "name=calm")
    assert calm.returncode == 0, calm.stderr
    compared = run_cli_real(environment, "checkpoint", "diff", "calm", "torn")
    assert "equal bit for bit" in compared.stdout, compared.stdout + compared.stderr


def run_cli_real(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.cli", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
