"""Two clusters that see one run directory: never both train, and the second goes on when the first is gone."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import psutil
import pytest

from pretrain.rundir import Event, RunDirectory
from tests.launch.runs import run_cli, start_cli, write_config
from tests.launch.test_submit import wait_for
from tests.launch.two_nodes import two_nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WAIT_S = 100.0


def drivers(run: RunDirectory) -> list[psutil.Process]:
    """Processes that control the run, or would like to."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if {"launch.driver", run.url} <= set(process.info["cmdline"] or [])
        and process.info["cmdline"][0].endswith("python")
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def test_one_of_two_clusters_trains_and_the_other_goes_on_once_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    home = tmp_path / "home"
    config = write_config(tmp_path, "wanted", fake={"steps": 50_000, "step_s": 0.05})
    words = ("submit", str(config), "--resume", "auto", "--address")
    with two_nodes() as (first, one), two_nodes() as (second, other):
        with start_cli(home, *words, first["dashboard"]) as left, start_cli(home, *words, second["dashboard"]) as right:
            said = {process: process.communicate(timeout=WAIT_S)[1] for process in (left, right)}
        codes = sorted(process.returncode for process in said)
        assert codes in ([0, 0], [0, 2]), said  # who comes a moment later is refused here, or by its driver
        assert all("is held by" in text for process, text in said.items() if process.returncode)
        run = RunDirectory.locate(str(home / "wanted"))

        def events(kind: str) -> list[Event]:
            return [event for event in run.events() if event.kind == kind]

        wait_for(lambda: events("committed"))
        wait_for(lambda: len(drivers(run)) == 1)
        time.sleep(5.0)  # longer than a keeper or a driver waits before it would try again
        (driver,) = drivers(run)
        assert len(events("attempt_started")) == 1
        ranks = [entry["pid"] for event in events("ranks_started") for entry in event.fields["processes"]]

        owner, rest = (one, second) if one in driver.parents() else (other, first)
        for process in [*owner.children(recursive=True), owner]:
            process.kill()
        wait_for(lambda: not any(psutil.pid_exists(pid) and psutil.Process(pid).is_running() for pid in ranks))
        last = int((home / "wanted" / "fake.step").read_text())

        def goes_on() -> bool:
            again = run_cli(home, *words, rest["dashboard"], timeout_s=WAIT_S)
            assert again.returncode == 0 or "is held by" in again.stderr, again.stderr
            return again.returncode == 0

        wait_for(goes_on)  # once the lease of the dead has been silent for long enough
        wait_for(lambda: len(events("attempt_started")) == 2 and events("restored"))
        assert events("restored")[0].fields["step"] == last
        stopped = run_cli(home, "stop", "wanted", timeout_s=WAIT_S)
        assert stopped.returncode == 0, stopped.stderr
    leases = [event.lease for event in events("attempt_started")]
    assert leases == sorted(set(leases))
