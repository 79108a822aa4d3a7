"""Standbys under real agents: they become ranks, and whatever happens to them costs a spawn, never an attempt."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.agents import standbys as module
from launch.agents.process import RankOrder
from launch.agents.standbys import StandbyOrder, Standbys
from tests.launch.test_controller import Scene, scene

pytestmark = pytest.mark.timeout(60)

LONG = {"steps": 2000, "step_s": 0.02}


def ready(play: Scene, attempt: int) -> bool:
    return any(event.fields["attempt"] == attempt for event in play.events("standbys_ready"))


def standby_pids(play: Scene, node: str = "n") -> set[int]:
    if node not in play.nodes.agents:
        return set()
    found = set()
    for child in psutil.Process(play.nodes.agents[node].pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # dead or a zombie since they were listed
            if "--standby" in child.cmdline():
                found.add(child.pid)
    return found - started_pids(play)


def started_pids(play: Scene) -> set[int]:
    return {entry["pid"] for event in play.events("ranks_started") for entry in event.fields["processes"]}


def kill_a_rank(play: Scene, attempt: int) -> float:
    victim = play.pids(attempt)[1]
    os.kill(victim, signal.SIGKILL)
    return time.monotonic()


def processes_of(play: Scene, attempt: int) -> list[dict[str, Any]]:
    play.pids(attempt)
    (event,) = [event for event in play.events("ranks_started") if event.fields["attempt"] == attempt]
    return list(event.fields["processes"])


def test_the_next_attempt_runs_in_the_processes_that_waited_and_new_ones_wait_after_it(tmp_path: Path) -> None:
    with scene(tmp_path, {"n": 2}, LONG, standbys=True) as play:
        assert [entry["standby"] for entry in processes_of(play, 1)] == [False, False]
        play.wait_for(lambda: ready(play, 1))
        waited = standby_pids(play)
        assert len(waited) == 2
        for pid in waited:  # it holds no port and no file of the run
            process = psutil.Process(pid)
            assert process.net_connections("inet") == []
            assert not [file.path for file in process.open_files() if file.path.startswith(play.run.url)]
        kill_a_rank(play, 1)
        assert [entry["standby"] for entry in processes_of(play, 2)] == [True, True]
        assert set(play.pids(2).values()) == waited
        play.wait_for(lambda: ready(play, 2))
        assert len(standby_pids(play)) == 2
        play.run.request_stop()
        assert play.end().event == "stopped"  # words reach a rank that was a standby
    for rank in (0, 1):  # its own log, from its first word on
        text = Path(play.run.store.local_path(play.run.log_key(2, rank))).read_text()  # type: ignore[arg-type]
        assert text.startswith(f"rank {rank} step")
    assert [event.fields["rank"] for event in play.events("fault")] == [1]


def test_a_killed_standby_is_replaced_and_nobody_is_blamed(tmp_path: Path) -> None:
    with scene(tmp_path, {"n": 2}, LONG, standbys=True) as play:
        play.wait_for(lambda: ready(play, 1))
        victim, other = sorted(standby_pids(play))
        os.kill(victim, signal.SIGKILL)
        play.wait_for(lambda: len(standby_pids(play) - {victim, other}) == 1)
        kill_a_rank(play, 1)
        assert other in {entry["pid"] for entry in processes_of(play, 2) if entry["standby"]}
        assert [event.fields["rank"] for event in play.events("fault")] == [1]


def test_a_standby_that_hangs_is_killed_within_2_s_and_a_new_process_takes_its_rank(tmp_path: Path) -> None:
    with scene(tmp_path, {"n": 2}, LONG, standbys=True) as play:
        play.wait_for(lambda: ready(play, 1))
        frozen = max(standby_pids(play))
        os.kill(frozen, signal.SIGSTOP)
        killed_t = kill_a_rank(play, 1)
        processes = processes_of(play, 2)
        assert time.monotonic() - killed_t < 6.0
        assert sorted(entry["standby"] for entry in processes) == [False, True]
        assert not psutil.pid_exists(frozen)
        play.wait_for(lambda: play.events("restored"))
        assert len(play.events("fault")) == 1
    assert "did not become a rank (exit code -9)" in play.log.getvalue()


def test_standbys_that_cannot_import_are_given_up_with_the_reason_and_ranks_are_spawned(tmp_path: Path) -> None:
    with scene(tmp_path, {"n": 2}, {**LONG, "standby": "exit:9"}, standbys=True) as play:
        play.wait_for(lambda: "no standbys on" in play.log.getvalue())
        assert "3 ended while they waited, the last with code 3" in play.log.getvalue()
        assert "SystemExit: 9" in play.log.getvalue()
        kill_a_rank(play, 1)
        assert [entry["standby"] for entry in processes_of(play, 2)] == [False, False]


def test_a_fault_before_the_standbys_are_ready_uses_them_as_they_are(tmp_path: Path) -> None:
    with scene(tmp_path, {"n": 2}, {**LONG, "standby": "slow:1.5"}, standbys=True) as play:
        play.wait_for(lambda: len(standby_pids(play)) == 2)
        assert not ready(play, 1)
        waited = standby_pids(play)
        kill_a_rank(play, 1)
        assert set(play.pids(2).values()) == waited
        play.wait_for(lambda: ready(play, 2))


def test_standbys_die_with_their_agent_even_when_they_are_stopped(tmp_path: Path) -> None:
    with scene(tmp_path, {"n1": 1, "n2": 1}, LONG, standbys=True, min_ranks=1) as play:
        play.wait_for(lambda: ready(play, 1))
        (standby,) = standby_pids(play, "n2")
        os.kill(standby, signal.SIGSTOP)
        play.nodes.kill("n2")
        play.wait_for(lambda: not psutil.pid_exists(standby) or psutil.Process(standby).status() == "zombie", 3.0)


ORDER = RankOrder(0, [sys.executable, "-c", "import time; time.sleep(60)"], ["--run", "x"], {"A": "1"}, {}, Path("log"))


@pytest.mark.parametrize(
    "changed",
    [
        lambda order, patch: replace(order, fixed={"A": "2"}),
        lambda order, patch: replace(order, command=[*order.command, "more"]),
        lambda order, patch: patch.setattr(module, "code_version", lambda: "edited") or order,
    ],
    ids=["environment", "command", "code"],
)
def test_a_standby_that_was_made_for_something_else_is_ended_and_not_used(
    changed: Callable[..., RankOrder], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, dict[str, Any]]] = []
    with selectors.DefaultSelector() as selector:
        standbys = Standbys(os.environ, selector, lambda rank, kind, /, **fields: said.append((kind, fields)))
        try:
            standbys.want(StandbyOrder(1, ORDER.command, ORDER.fixed))
            standbys.check()
            standbys.rest()
            pid = standbys._waiting[0].child.pid
            assert standbys.take(changed(ORDER, monkeypatch)) is None
            while standbys._waiting:
                for key, _ in selector.select(5.0):
                    key.data()
            assert not psutil.pid_exists(pid)
            assert standbys._failures == 1
        finally:
            standbys.close()


def test_standbys_are_refused_with_the_numbers_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, dict[str, Any]]] = []
    memory = psutil.virtual_memory()._replace(available=2**29)
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: memory)
    with selectors.DefaultSelector() as selector:
        standbys = Standbys(os.environ, selector, lambda rank, kind, /, **fields: said.append((kind, fields)))
        standbys.want(StandbyOrder(8, ORDER.command, ORDER.fixed))
        standbys.check()
    ((kind, fields),) = said
    assert kind == "note"
    assert "8 want 6.2 GB of free memory and 0.5 GB are free" in fields["message"]
