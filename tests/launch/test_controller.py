"""Controller, agents and rank processes, all real, without Ray: faults, their messages, bounds and ends."""

from __future__ import annotations

import io
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.controller.attempt import RankSetting
from launch.controller.controller import Controller, limits_of
from launch.controller.crew import Crew
from launch.controller.hub import Hub
from launch.controller.state import Outcome, Stop
from launch.session import RunLogs, hold_run
from pretrain.errors import StoreError
from pretrain.log import Log
from pretrain.rundir import Event, EventKind, RunDirectory
from tests.launch.nodes import ProcessNodes
from tests.launch.runs import RANK_COMMAND, config_for

pytestmark = pytest.mark.timeout(240)


class Scene:
    """One run under a controller in a thread; the test plays the world."""

    command: Sequence[str] = RANK_COMMAND
    silent_s = 1.0  # an agent that says nothing for so long is lost
    address = "127.0.0.1"  # of the controller
    one_host = True
    nodes_class: type[ProcessNodes] = ProcessNodes

    def __init__(self, folder: Path, slots: dict[str, int], fake: dict[str, Any], **config: Any) -> None:
        health = config.pop("health", {})
        self.config = config_for(folder, fake=fake, **config)
        changed = {"health": self.config.health.model_copy(update=health)}
        self.config = self.config.model_copy(update=changed)
        self.run, _ = RunDirectory.claim(self.config, resume="auto", home=str(folder / "home"))
        self.begin(self.nodes_class(slots))

    def begin(self, nodes: Any) -> None:
        """The controller starts; `nodes` are where its slots come from."""
        self.nodes = nodes
        self.log = io.StringIO()
        self.outcome: Outcome | None = None
        self._error: BaseException | None = None
        self.controller: Controller | None = None
        self._thread = threading.Thread(target=self._control)
        self._thread.start()

    def _control(self) -> None:
        try:
            log = Log(stream=self.log)
            with hold_run(self.run, [], purpose="test", takeover=False, log=log) as lease:
                setting = RankSetting(
                    self.run.url, self.command, lease.token, environment=self.config.cluster.environment
                )
                crew = Crew(self.nodes, setting, RunLogs(self.run), self.address, self.silent_s)
                try:
                    limits = limits_of(self.config, one_host=self.one_host)
                    self.controller = Controller(self.run, lease, crew, limits, host="here", log=log)
                    self.outcome = self.controller.run()
                finally:
                    crew.close()
        except BaseException as error:
            self._error = error
            raise

    def end(self, timeout_s: float = 120.0) -> Outcome:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), self.log.getvalue()
        assert self.outcome is not None, self._error
        return self.outcome

    def events(self, kind: str) -> list[Event]:
        return [event for event in self.run.events() if event.kind == kind]

    def wait_for(self, what: Callable[[], Any], timeout_s: float = 100.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = what()
            if found:
                return found
            assert self._thread.is_alive(), self.log.getvalue()
            time.sleep(0.02)
        raise AssertionError(f"did not happen: {self.log.getvalue()}")

    def pids(self, attempt: int) -> dict[int, int]:
        """Pids by rank, once the journal has them."""

        def look() -> dict[int, int]:
            for event in self.events("ranks_started"):
                if event.fields["attempt"] == attempt:
                    return {entry["rank"]: entry["pid"] for entry in event.fields["processes"]}
            return {}

        return dict(self.wait_for(look))


@contextmanager
def scene(folder: Path, slots: dict[str, int], fake: dict[str, Any], **config: Any) -> Iterator[Scene]:
    play = Scene(folder, slots, fake, **config)
    try:
        yield play
    finally:
        if play.controller:
            play.controller.ask(Stop.NOW)
        play._thread.join(20.0)


def test_a_rank_killed_from_outside_is_seen_at_once_named_and_the_run_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scene, "silent_s", 60.0)
    with scene(tmp_path, {"n": 2}, {"steps": 60, "step_s": 0.03}) as play:
        victim = play.pids(1)[1]
        log = Path(play.run.url) / play.run.log_key(1, 1)
        play.wait_for(lambda: play.events("committed") and b"rank 1 step" in log.read_bytes())
        killed_t = time.time()
        os.kill(victim, signal.SIGKILL)
        outcome = play.end()
    fault = play.events("fault")[0]
    assert fault.t - killed_t < 30.0  # 4 to 9 ms on two idle cores; by silence it takes 60 s
    assert fault.fields["rank"] == 1
    assert fault.fields["exit_code"] == -9
    host = socket.gethostname()
    assert f"rank 1 on {host} was ended by signal 9, likely out of memory" in fault.fields["message"]
    assert "rank 1 step" in fault.fields["log_tail"]
    assert (outcome.event, outcome.exit_code, outcome.step) == ("completed", 0, 60)
    assert [event.fields["attempt"] for event in play.events("attempt_started")] == [1, 2]
    restored = play.events("restored")[0].fields["step"]
    assert restored in [event.fields["step"] for event in play.events("committed")]
    assert [event.fields["outcome"] for event in play.events("attempt_ended")] == ["failed", "completed"]
    assert play.run.status().state == "completed"


def test_a_store_that_fails_for_a_moment_at_the_end_costs_no_run_its_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end is kept and tried again, though the done requests could not be removed either."""
    with scene(tmp_path, {"n": 2}, {"steps": 60, "step_s": 0.03}) as play:
        play.wait_for(lambda: play.events("committed"))
        assert play.controller is not None
        append = play.controller._journal.append
        fails = iter([True, False])

        def append_once_in_vain(kind: EventKind, **fields: Any) -> Any:
            if kind == EventKind.COMPLETED and next(fails):
                raise StoreError("a moment without a network")
            return append(kind, **fields)

        def clear(run: RunDirectory) -> None:
            raise StoreError("a moment without a network")

        monkeypatch.setattr(play.controller._journal, "append", append_once_in_vain)
        monkeypatch.setattr(RunDirectory, "clear_requests", clear)
        outcome = play.end()
    assert (outcome.event, outcome.exit_code) == ("completed", 0)
    assert play.run.status().state == "completed"


@pytest.mark.parametrize(
    ("do", "code", "text"),
    [("exit:2", 2, "not tried again"), ("exit:3", 3, "crash loop: 3 attempts in a row ended at step 7")],
)
def test_user_errors_end_at_once_and_crash_loops_after_three(tmp_path: Path, do: str, code: int, text: str) -> None:
    faults = [{"attempt": attempt, "rank": 0, "step": 7, "do": do} for attempt in range(1, 9)]
    with scene(tmp_path, {"n": 2}, {"steps": 20, "faults": faults}) as play:
        outcome = play.end()
    assert (outcome.event, outcome.exit_code) == ("failed", code)
    assert text in outcome.reason
    assert f"rank 0 does {do}" in outcome.reason
    assert len(play.events("attempt_started")) == (1 if code == 2 else 3)
    assert play.events("failed")[0].fields["exit_code"] == code


def test_the_first_traceback_of_a_rank_is_told_from_its_beginning(tmp_path: Path) -> None:
    faults = [{"attempt": 1, "rank": 0, "step": 3, "do": "raise:8"}]
    with scene(tmp_path, {"n": 2}, {"steps": 10, "faults": faults}) as play:
        assert play.end().event == "completed"
    fault = play.events("fault")[0].fields
    assert fault["rank"] == 0
    lines = fault["log_tail"].splitlines()
    assert len(lines) > 15
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: the row is odd"
    assert fault["log_tail"] in play.log.getvalue()


def test_a_victim_that_reports_first_is_not_blamed(tmp_path: Path) -> None:
    faults = [
        {"attempt": 1, "rank": 0, "step": 3, "do": "exit:6"},
        {"attempt": 1, "rank": 1, "step": 6, "do": "signal:11"},
    ]
    with scene(tmp_path, {"n": 2}, {"steps": 10, "step_s": 0.05, "faults": faults}) as play:
        assert play.end().event == "completed"
    assert [event.fields["rank"] for event in play.events("fault")] == [1]


def test_a_silent_rank_is_killed_as_hung_and_the_run_completes(tmp_path: Path) -> None:
    faults = [{"attempt": 1, "rank": 1, "step": 4, "do": "hang"}]
    limits = {"heartbeat_timeout_s": 2.0, "start_timeout_s": 20.0}
    with scene(tmp_path, {"n": 2}, {"steps": 40, "step_s": 0.1, "faults": faults}, health=limits) as play:
        hung = play.pids(1)[1]
        outcome = play.end()
    assert outcome.event == "completed", outcome.reason
    fault = play.events("fault")[0].fields
    assert fault["cause"] == "hang"
    assert fault["rank"] == 1
    assert "phase data at step 4" in fault["message"]
    assert not psutil.pid_exists(hung)


def test_a_killed_node_is_charged_as_a_node_and_the_run_shrinks_to_min_ranks(tmp_path: Path) -> None:
    with scene(tmp_path, {"n1": 1, "n2": 1}, {"steps": 40, "step_s": 0.05}, min_ranks=1) as play:
        orphans = play.pids(1)
        play.wait_for(lambda: play.events("committed"))
        play.nodes.kill("n2")
        assert play.end().event == "completed"
    fault = play.events("fault")[0].fields
    assert fault["cause"] == "node"
    assert [event.fields["ranks"] for event in play.events("attempt_started")] == [2, 1]
    assert not any(psutil.pid_exists(pid) for pid in orphans.values())  # lifeline and parent-death signal


def test_a_frozen_agent_is_lost_by_silence_alone(tmp_path: Path) -> None:
    with scene(tmp_path, {"n1": 1, "n2": 1}, {"steps": 1000, "step_s": 0.1}, min_ranks=1) as play:
        play.pids(1)
        frozen = play.nodes.agents["n2"].pid
        play.nodes.freeze("n2")
        fault = play.wait_for(lambda: play.events("fault"))[0]
        assert "its agent was silent for" in fault.fields["message"]
        play.controller.ask(Stop.NOW)  # type: ignore[union-attr]
        play.end()
    deadline = time.monotonic() + 5.0  # its slots are given back in the background
    while psutil.pid_exists(frozen) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(frozen)


@pytest.mark.parametrize(("now", "saved"), [(False, True), (True, False)])
def test_a_stop_request_in_the_run_directory_ends_with_4(tmp_path: Path, now: bool, saved: bool) -> None:
    with scene(tmp_path, {"n": 2}, {"steps": 1000, "step_s": 0.05, "commit_every": 10_000}) as play:
        play.pids(1)
        play.wait_for(lambda: play.run.store.exists(play.run.metrics_key(1)))
        asked_t = time.monotonic()
        play.run.request_stop(now=now)
        outcome = play.end()
    assert (outcome.event, outcome.exit_code) == ("stopped", 4)
    assert bool(play.events("committed")) is saved
    assert time.monotonic() - asked_t < 10.0
    assert play.run.pending_requests() == []
    assert play.run.status().state == "stopped"


def test_a_newer_lease_ends_the_controller_with_7_and_its_ranks(tmp_path: Path) -> None:
    from pretrain.rundir import Lease

    with scene(tmp_path, {"n": 2}, {"steps": 1000, "step_s": 0.05}) as play:
        pids = play.pids(1)
        with Lease.acquire(play.run.store, purpose="other", takeover=True):
            outcome = play.end()
    assert outcome.exit_code == 7
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


def test_a_command_that_cannot_be_run_is_a_clear_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scene, "command", ["/no/such/python"])
    with scene(tmp_path, {"n": 2}, {"steps": 3}, max_node_failures=0) as play:
        outcome = play.end()
    assert (outcome.event, outcome.exit_code) == ("failed", 3)
    assert "/no/such/python" in outcome.reason


def test_the_agent_kills_its_ranks_when_the_controller_is_gone(tmp_path: Path) -> None:
    hub = Hub("127.0.0.1", "secret")
    nodes = ProcessNodes({"n": 1})
    nodes.launch({"n": 1}, hub.address, "secret")
    number, hello = hub.received.get(timeout=20.0)
    assert hello["node"] == "n"
    rank = {"rank": 0, "environment": {}, "log": str(tmp_path / "log"), "log_url": None, "log_key": None}
    order = {"kind": "start", "attempt": 1, "command": ["sleep"], "arguments": ["1000"], "environment": {}}
    hub.send(number, {**order, "ranks": [rank]})
    message: dict[str, Any] = {}
    while message.get("kind") != "spawned":
        _, message = hub.received.get(timeout=10.0)
    pid = message["process"]["pid"]
    assert psutil.pid_exists(pid)
    hub.close()
    assert nodes.agents["n"].wait(10.0) == 0
    assert not psutil.pid_exists(pid)


def test_a_stranger_without_the_secret_is_not_heard(tmp_path: Path) -> None:
    hub = Hub("127.0.0.1", "secret")
    try:
        with socket.create_connection(hub.address) as stranger:
            stranger.sendall(b'{"kind":"hello","secret":"guess","node":"n","host":"h","address":"a"}\n')
            stranger.settimeout(5.0)
            assert stranger.recv(100) == b""
        assert hub.received.empty()
    finally:
        hub.close()


class NoSuchAddress(ProcessNodes):
    """Agents that are told an address of this host that it has not: behind a wrong /etc/hosts, or NAT."""

    address = "192.0.2.77"


def test_an_agent_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scene, "nodes_class", NoSuchAddress)
    with scene(tmp_path, {"n": 2}, {"steps": 3}, max_node_failures=0) as play:
        outcome = play.end()
    assert outcome.event == "failed"
    (fault,) = play.events("fault")
    assert fault.fields["cause"] == "node"
    assert "failed: OSError: [Errno 99]" in fault.fields["message"]
    assert "[Errno 99]" in outcome.reason
