"""Submitted runs from a folder with a space, by relative paths: stopped by Ray, gone on at another size, and failed.

One cluster of `pretrain cluster up`, whose nodes and jobs are real; the ranks are fake.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from launch.runs import has_ended
from pretrain.rundir import Event, RunDirectory
from tests.launch.runs import RANK_COMMAND, write_config
from tests.launch.test_jobs import Cluster, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    folder = tmp_path / "of mine"
    folder.mkdir()
    with tempfile.TemporaryDirectory(prefix="e", dir="/tmp") as temporary:
        cluster = Cluster(folder, Path(temporary), PRETRAIN_RANK_COMMAND=json.dumps(RANK_COMMAND))
        cluster.up()
        yield cluster
        cluster.down()
        assert cluster.processes() == []
        assert list(cluster.temporary.iterdir()) == []


def pretrain(cluster: Cluster, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command that is typed in that folder."""
    return subprocess.run(
        [sys.executable, "-m", "launch.cli", *words], env=cluster.environment, cwd=folder,
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def relative(config: Path) -> str:
    """The config with its paths as somebody writes them who stands beside it."""
    body = yaml.safe_load(config.read_text())
    body["tokenizer"], body["data"]["sources"]["text"]["path"] = "tokenizer.json", "source"
    config.write_text(yaml.safe_dump(body))
    return config.name


def test_a_run_that_is_stopped_before_its_driver_has_begun_stops(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "of mine"
    config = write_config(folder, "early", fake={"steps": 50_000, "step_s": 0.05})
    sent = pretrain(cluster, folder, "submit", str(config), "--address", "auto")
    assert sent.returncode == 0, sent.stderr
    run = RunDirectory.locate(str(cluster.home / "early"))
    run.request_stop()  # as `pretrain stop` does, whose own start would take as long as the driver's
    assert run.events() == [], "the driver was quicker"
    wait_for(lambda: any(event.kind == "stopped" for event in run.events()))


def test_a_run_is_stopped_by_ray_goes_on_at_another_size_and_its_failure_is_the_commands(
    cluster: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "of mine"
    # A home that is relative, to the folder where the command is typed.
    cluster.environment = {**cluster.environment, "PRETRAIN_HOME": "home"}
    config = relative(write_config(folder, "sent", fake={"steps": 50_000, "step_s": 0.05}))
    submit = ("submit", config, "--address", "auto", "--resume", "auto")
    sent = pretrain(cluster, folder, *submit)
    assert (sent.returncode, sent.stdout) == (0, "sent\n"), sent.stderr
    run = RunDirectory.locate(str(cluster.home / "sent"))

    def events(kind: str) -> list[Event]:
        return [event for event in run.events() if event.kind == kind]

    wait_for(lambda: events("committed"))
    kept = run.config()
    assert (kept.tokenizer, kept.data.sources["text"].path) == (f"{folder}/tokenizer.json", f"{folder}/source")

    submission = sent.stderr.split("Ray job ")[1].split(";")[0]
    stopped = subprocess.run(
        [Path(sys.executable).with_name("ray"), "job", "stop", submission], env=cluster.environment,
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert stopped.returncode == 0, stopped.stderr
    wait_for(lambda: events("interrupted"))
    last = int(events("interrupted")[0].fields["step"])
    assert (cluster.home / "sent" / "fake.step").read_text() == str(last)
    wait_for(lambda: not cluster.processes("ray::Keeper"))  # it does not start again what was stopped on purpose
    assert not cluster.processes("launch.driver")

    again = pretrain(cluster, folder, *submit, "cluster.num_ranks=1", "checkpoint.keep_last=4")
    assert again.returncode == 0, again.stderr
    assert not has_ended(run.status()), "`stop` and `logs -f` would say that nothing runs"
    assert "keep_last" in again.stdout + again.stderr
    wait_for(lambda: events("restored"))
    assert [event.fields["ranks"] for event in events("attempt_started")] == [2, 1]
    assert events("restored")[0].fields["step"] == last
    ended = pretrain(cluster, folder, "stop", "sent", "--now")
    assert ended.returncode == 0, ended.stderr
    assert len(events("stopped")) == 1

    faults = [{"attempt": attempt, "rank": 0, "step": 3, "do": "raise:1"} for attempt in range(1, 9)]
    broken = relative(write_config(folder, "broken", fake={"steps": 50, "faults": faults}, max_application_failures=1))
    failed = pretrain(cluster, folder, "submit", broken, "--address", "auto", "--wait")
    assert failed.returncode == 3, failed.stderr
    assert "the row is odd" in failed.stdout + failed.stderr
    assert "Traceback (most recent call last)" not in failed.stderr.split("the row is odd")[-1]
    status = json.loads(pretrain(cluster, folder, "status", "broken", "--json").stdout)
    assert status["state"] == "failed"
