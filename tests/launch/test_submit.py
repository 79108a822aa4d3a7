"""`pretrain submit` to a Ray of two nodes: returns at once, outlives its driver, is followed and stopped by files."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pretrain.rundir import RunDirectory
from tests.launch.runs import run_cli, start_cli, write_config
from tests.launch.two_nodes import two_nodes

pytestmark = pytest.mark.timeout(280)
WAIT_S = 100.0


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with two_nodes() as (told, _):
        yield told


def wait_for(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError("did not happen")


def processes(*words: str) -> list[psutil.Process]:
    """Those of this cluster that have, for each of the words, an argument that begins with it."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            arguments = process.cmdline()
            if all(any(argument.startswith(word) for argument in arguments) for word in words):
                ours = process.environ().get("RAY_AUTH_TOKEN") == os.environ["RAY_AUTH_TOKEN"]
                found += [process] if ours and process.status() != psutil.STATUS_ZOMBIE else []
    return found


def test_a_submitted_run_goes_on_after_its_keeper_and_its_driver_died_and_stops_on_request(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    config = write_config(tmp_path, "sent", fake={"steps": 5000, "step_s": 0.05})
    submitted = run_cli(home, "submit", str(config), "--address", cluster["dashboard"], timeout_s=WAIT_S)
    assert submitted.returncode == 0, submitted.stderr
    assert submitted.stdout == "sent\n"
    run = RunDirectory.locate(str(home / "sent"))

    def events(kind: str) -> list[Any]:
        return [event for event in run.events() if event.kind == kind]

    wait_for(lambda: events("committed"))
    # Both CPUs of the cluster train: the driver takes none.
    assert events("attempt_started")[0].fields["ranks"] == 2
    twice = run_cli(home, "submit", str(config), "--address", cluster["address"], "--resume", "auto")
    assert twice.returncode == 2
    assert "is held by pid" in twice.stderr

    (driver,) = processes("launch.driver", run.url)
    ranks = [entry["pid"] for event in events("ranks_started") for entry in event.fields["processes"]]
    (keeper,) = wait_for(lambda: processes("ray::Keeper"))
    keeper.kill()  # training does not feel it, and the next one starts a dead driver again
    wait_for(lambda: [one for one in processes("ray::Keeper") if one.pid != keeper.pid])
    assert all(psutil.pid_exists(pid) for pid in ranks)
    assert driver.is_running()
    driver.kill()
    with start_cli(home, "logs", "sent", "-f") as follower:
        wait_for(lambda: len(events("attempt_started")) == 2 and events("restored"))
        assert not any(psutil.pid_exists(pid) for pid in ranks)
        stopped = run_cli(home, "stop", "sent", timeout_s=WAIT_S)
        followed, _ = follower.communicate(timeout=WAIT_S)
    assert stopped.returncode == 0, stopped.stderr
    assert "stopped at step" in stopped.stdout
    assert follower.returncode == 0
    assert "--- attempt 2 ---" in followed
    status = json.loads(run_cli(home, "status", "sent", "--json").stdout)
    assert status["state"] == "stopped"
    assert status["attempt"] == 2
    last = int(events("stopped")[0].fields["step"])
    assert (home / "sent" / "fake.step").read_text() == str(last)


def test_an_address_where_nothing_listens_is_a_user_error_and_takes_no_name(tmp_path: Path) -> None:
    home = tmp_path / "home"
    config = write_config(tmp_path, "sent", fake={"steps": 5})
    result = run_cli(home, "submit", str(config), "--address", "http://127.0.0.1:9")
    assert result.returncode == 2
    assert "--address=http://127.0.0.1:9 does not answer" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (home / "sent").exists()
    assert os.listdir(tmp_path)
