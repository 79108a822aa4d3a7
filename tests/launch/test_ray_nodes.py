"""A submitted run on a Ray whose nodes die, join and leave under it. The ranks are fake, Ray and its nodes are real.

Ray itself needs 13 s to see that a node is dead, and until then its table offers the dead one's slots.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from pretrain.rundir import Event, RunDirectory
from tests.launch.runs import run_cli, write_config
from tests.launch.test_submit import wait_for
from tests.launch.two_nodes import two_nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RAY_KNOWS_AFTER_S = 13.0


class Nodes(NamedTuple):
    """A Ray of two nodes, as `tests.launch.two_nodes` runs it."""

    told: dict[str, str]
    process: psutil.Popen

    def order(self, words: str) -> None:
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


def lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with two_nodes() as (told, process):
        yield Nodes(told, process)


class Submitted:
    """A run that was submitted to them."""

    def __init__(self, home: Path, config: Path, nodes: Nodes) -> None:
        sent = run_cli(home, "submit", str(config), "--address", nodes.told["dashboard"], timeout_s=100.0)
        assert sent.returncode == 0, sent.stderr
        self.home, self.name = home, sent.stdout.strip()
        self.run = RunDirectory.locate(str(home / self.name))

    def events(self, kind: str) -> list[Event]:
        return [event for event in self.run.events() if event.kind == kind]

    def attempt(self, number: int) -> Event:
        """Waits for its start, and for its ranks to train."""
        wait_for(lambda: any(event.fields["attempt"] == number for event in self.events("attempt_started")))
        wait_for(lambda: self.steps(number))
        return self.events("attempt_started")[number - 1]

    def steps(self, attempt: int) -> list[int]:
        path = self.home / self.name / "metrics" / f"attempt-{attempt:03d}.jsonl"
        return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []

    def processes(self, attempt: int) -> list[int]:
        started = [event for event in self.events("ranks_started") if event.fields["attempt"] == attempt]
        return [entry["pid"] for event in started for entry in event.fields["processes"]]


def test_a_run_loses_a_node_gets_one_and_is_told_that_it_goes(nodes: Nodes, tmp_path: Path) -> None:
    home, fake = tmp_path / "home", {"steps": 50_000, "step_s": 0.05}
    run = Submitted(home, write_config(tmp_path, "sent", fake=fake, min_ranks=1), nodes)
    assert run.attempt(1).fields["ranks"] == 2
    wait_for(lambda: run.events("committed"))
    wait_for(lambda: len(run.processes(1)) == 2)

    killed_t = time.time()
    nodes.order("kill")
    smaller = run.attempt(2)
    assert smaller.fields["ranks"] == 1
    assert smaller.t - killed_t < RAY_KNOWS_AFTER_S
    (fault,) = run.events("fault")
    assert fault.fields["cause"] == "node"
    wait_for(lambda: not any(lives(pid) for pid in run.processes(1)))
    assert time.time() - killed_t < RAY_KNOWS_AFTER_S

    nodes.order("add")
    assert run.attempt(3).fields["ranks"] == 2
    nodes.order("drain 30")
    drained_t = time.time()
    last = run.attempt(4)
    assert last.fields["ranks"] == 1
    assert last.t - drained_t < 30.0
    assert [event.fields["outcome"] for event in run.events("attempt_ended")] == ["failed", "moved", "moved"]
    assert "leaves in" in last.fields["why"]
    # Both moves go on with the very next step.
    for before in (2, 3):
        assert run.steps(before + 1)[0] == run.steps(before)[-1] + 1
    assert len(run.events("fault")) == 1

    stopped = run_cli(home, "stop", "sent", timeout_s=100.0)
    assert stopped.returncode == 0, stopped.stderr
    assert run.events("stopped")[0].fields["step"] == run.steps(4)[-1]
