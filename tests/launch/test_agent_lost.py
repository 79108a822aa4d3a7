"""The agent of a run on one machine is killed: with its Ray alive it is replaced at once, without it the run ends."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil
import pytest

from pretrain.rundir import Event, RunDirectory
from tests.launch.runs import start_cli, write_config
from tests.launch.test_train import START_S, committed, ended, wait_for

pytestmark = pytest.mark.timeout(600)


def agent_of(train: subprocess.Popen[str]) -> psutil.Process:
    family = psutil.Process(train.pid).children(recursive=True)
    (agent,) = [process for process in family if process.name().startswith("ray::AgentActor")]
    return agent


def events(home: Path, kind: str) -> list[Event]:
    return [event for event in RunDirectory.locate(str(home / "run")).events() if event.kind == kind]


def test_a_killed_agent_on_one_machine_is_replaced_without_a_rest(tmp_path: Path) -> None:
    home = tmp_path / "home"
    config = write_config(tmp_path, "run", fake={"steps": 200, "step_s": 0.05})
    with ended(start_cli(home, "train", str(config))) as train:
        wait_for(lambda: (home / "run" / "run.yaml").exists() and committed(home, "run"), train)
        killed_t = time.time()
        agent_of(train).kill()
        out, err = train.communicate(timeout=START_S)
    assert train.returncode == 0, err
    assert "completed at step 200" in out
    second = events(home, "attempt_started")[1]
    assert second.t - killed_t < 60.0  # 2 s on idle cores
    assert events(home, "fault")[0].fields["cause"] == "node"


def test_without_ray_and_agent_the_run_ends_as_interrupted_and_says_why(tmp_path: Path) -> None:
    home = tmp_path / "home"
    config = write_config(tmp_path, "run", fake={"steps": 5000, "step_s": 0.05})
    with ended(start_cli(home, "train", str(config))) as train:
        wait_for(lambda: (home / "run" / "run.yaml").exists() and committed(home, "run"), train)
        family = psutil.Process(train.pid).children(recursive=True)
        (service,) = [process for process in family if process.name().startswith("gcs_server")]
        agent = agent_of(train)
        service.kill()
        agent.kill()
        killed_t = time.time()
        _, err = train.communicate(timeout=START_S)
    assert time.time() - killed_t < 200.0  # 30 s on idle cores
    assert train.returncode == 5, err
    (end,) = events(home, "interrupted")
    assert "Ray has told nothing about its nodes" in end.fields["reason"]
    _, alive = psutil.wait_procs(family, timeout=10.0)
    assert alive == []
