"""The controller's end of its agents, looked at from an agent: words in order, strangers, garbage."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from launch.controller.attempt import RankSetting
from launch.controller.crew import MESSAGES_PER_LOOK, Crew
from launch.controller.hub import Hub
from launch.controller.offers import Offer, Seat

pytestmark = pytest.mark.timeout(30)


class OneNode:
    """A node whose agent is the test."""

    def __init__(self) -> None:
        self.launched: tuple[tuple[str, int], str] | None = None

    def offers(self) -> dict[str, Offer]:
        return {"n": Offer(1, "h")}

    def door(self, node: str) -> None:
        return None

    def launch(self, slots: Mapping[str, int], controller: tuple[str, int], secret: str) -> None:
        self.launched = controller, secret

    def release(self, node: str) -> None:
        pass


class NoLogs:
    def of(self, attempt: int, rank: int) -> dict[str, str | None]:
        return {"log": "/dev/null", "log_url": None, "log_key": None}

    def of_evaluator(self) -> dict[str, str | None]:
        return self.of(0, -1)


def _send(agent: socket.socket, **message: Any) -> None:
    agent.sendall(json.dumps(message).encode() + b"\n")


def _words(agent: socket.socket) -> Generator[dict[str, Any]]:
    """What the controller says, without its signs of life."""
    with agent.makefile() as lines:
        for line in lines:
            message = json.loads(line)
            if message["kind"] != "alive":
                yield message


def _launch(crew: Crew, nodes: OneNode, slots: int = 1) -> None:
    """Gets slots and goes on until their agent was asked for."""
    while crew.offers() is None:
        crew.look(0.01)
    crew.place(slots)
    while nodes.launched is None:
        crew.look(0.01)


def _greet(agent: socket.socket, crew: Crew, nodes: OneNode) -> None:
    """Says hello as the agent that was asked for, and goes on until the rank has its place."""
    assert nodes.launched is not None
    _send(agent, kind="hello", secret=nodes.launched[1], node="n", host="h", address="127.0.0.1", pid=1)
    while crew.look(0.01).placed is None:
        pass


@contextmanager
def _started(crew: Crew, nodes: OneNode) -> Iterator[tuple[socket.socket, Generator[dict[str, Any]]]]:
    """An agent whose rank is being started, and what it hears."""
    assert nodes.launched is not None
    with socket.create_connection(nodes.launched[0]) as agent:
        agent.settimeout(10.0)
        heard = _words(agent)
        _greet(agent, crew, nodes)
        crew.start(1, 1)
        yield agent, heard


def test_a_flood_of_news_is_taken_in_parts_in_order_and_whole():
    nodes, told, total = OneNode(), MESSAGES_PER_LOOK, 3 * MESSAGES_PER_LOOK + 7
    crew = Crew(nodes, RankSetting("/run", ["rank"], "1:x"), NoLogs(), "127.0.0.1", 5.0)
    try:
        _launch(crew, nodes)
        with _started(crew, nodes) as (agent, heard):
            assert next(heard)["kind"] == "reserve"
            _send(agent, kind="port", attempt=1, port=4711)
            for _ in range(20):
                crew.look(0.01)
            assert next(heard)["kind"] == "start"
            for step in range(total):
                _send(agent, kind="lines", attempt=1, rank=0, lines=[{"phase": "step", "step": step}])
            deadline = time.monotonic() + 10.0
            while crew._hub.received.qsize() < total and time.monotonic() < deadline:
                time.sleep(0.01)
            looks = [crew.look(1.0) for _ in range(4)]
            assert [(len(news.beats), news.is_part) for news in looks] == [(told, True)] * 3 + [(7, False)]
            assert [beat.step for news in looks for beat in news.beats] == list(range(total))
    finally:
        crew.close()


def test_ranks_that_start_after_a_word_was_said_hear_it_too():
    nodes = OneNode()
    crew = Crew(nodes, RankSetting("/run", ["rank"], "1:x"), NoLogs(), "127.0.0.1", 5.0)
    try:
        _launch(crew, nodes)
        with _started(crew, nodes) as (agent, heard):
            assert next(heard)["kind"] == "reserve"
            crew.say("stop")  # the ranks do not exist yet: their agent looks for a port
            assert next(heard) == {"kind": "word", "word": "stop"}
            _send(agent, kind="port", attempt=1, port=4711)
            for _ in range(20):
                crew.look(0.01)
            assert next(heard)["kind"] == "start"
            assert next(heard) == {"kind": "word", "word": "stop"}
    finally:
        crew.close()


class TwoSlots(OneNode):
    def offers(self) -> dict[str, Offer]:
        return {"n": Offer(2, "h")}


def test_checkpoints_are_measured_on_a_slot_without_a_rank_until_a_rank_needs_it_or_its_agent_is_gone():
    nodes = TwoSlots()
    crew = Crew(nodes, RankSetting("/run", ["rank"], "1:x"), NoLogs(), "127.0.0.1", 60.0)
    try:
        _launch(crew, nodes, 2)
        with socket.create_connection(nodes.launched[0]) as agent:
            agent.settimeout(10.0)
            heard = _words(agent)
            _greet(agent, crew, nodes)
            crew.start(1, 2)
            assert next(heard)["kind"] == "reserve"
            crew.evaluate()  # both slots have ranks: told at once, and nothing is asked of the agent
            assert crew.look(0.01).evaluator_code == 0
            crew.start(2, 1)
            assert next(heard)["kind"] == "reserve"
            crew.evaluate()
            order = next(heard)
            assert (order["kind"], order["run"], order["log"]) == ("evaluate", "/run", "/dev/null")
            crew.start(3, 1)  # another attempt on one slot: it stays
            assert next(heard)["kind"] == "reserve"
            crew.start(4, 2)
            assert next(heard) == {"kind": "evaluate", "run": None}
            assert next(heard)["kind"] == "reserve"
            _send(agent, kind="evaluated", attempt=0, code=0)
            assert _next_code(crew) == 0
            crew.start(5, 1)
            crew.evaluate()
            heard.close()
        assert _next_code(crew) == 0  # the agent is gone
    finally:
        crew.close()


def _next_code(crew: Crew) -> int:
    while (code := crew.look(0.01).evaluator_code) is None:
        pass
    return code


@pytest.mark.parametrize(
    "garbage",
    [b'{"kind":"hello","secret":"\xc3\xbc"}\n', b'{"kind":"hello","secret":"\\ud800"}\n', b"[" * 200_000 + b"\n"],
    ids=["not ASCII", "a lone surrogate", "too deep"],
)
def test_a_stranger_cannot_deafen_the_controller(garbage):
    hub = Hub("127.0.0.1", "secret")
    try:
        with socket.create_connection(hub.address) as stranger:
            stranger.sendall(garbage)
            stranger.settimeout(5.0)
            assert stranger.recv(100) == b""
        with socket.create_connection(hub.address) as agent:
            _send(agent, kind="hello", secret="secret", node="n")
            _, message = hub.received.get(timeout=5.0)
            assert message["node"] == "n"
    finally:
        hub.close()


def test_ranks_can_be_started_on_living_agents_while_nobody_knows_of_free_slots():
    class Forgetful(OneNode):
        def offers(self) -> dict[str, Offer]:
            if self.launched:
                raise ConnectionError("the control service of Ray is gone")
            return super().offers()

    nodes = Forgetful()
    crew = Crew(nodes, RankSetting("/run", ["rank"], "1:x"), NoLogs(), "127.0.0.1", 60.0)
    try:
        _launch(crew, nodes)
        with socket.create_connection(nodes.launched[0]) as agent:
            _greet(agent, crew, nodes)
            while crew.offers() is not None:  # looked at twice a second
                crew.look(0.01)
            assert crew.held().nodes == {"n": Offer(1, "h")}
            crew.place(1)
            assert crew.look(0.01).placed == (Seat("n", "h"),)
    finally:
        crew.close()


@pytest.mark.parametrize("keep", [True, False])
def test_a_leaving_node_is_replaced_and_its_agent_ended_unless_its_ranks_still_train(keep: bool):
    class Leaving(OneNode):
        def offers(self) -> dict[str, Offer]:
            return {"n": Offer(1, "h", 300.0), "m": Offer(1, "h")} if self.launched else super().offers()

        def launch(self, slots: Mapping[str, int], controller: tuple[str, int], secret: str) -> None:
            super().launch(slots, controller, secret)
            asked.append(dict(slots))

    nodes, asked = Leaving(), []
    crew = Crew(nodes, RankSetting("/run", ["rank"], "1:x"), NoLogs(), "127.0.0.1", 60.0)
    try:
        _launch(crew, nodes)
        with socket.create_connection(nodes.launched[0]) as agent:
            _greet(agent, crew, nodes)
            while crew.held().nodes != {"n": Offer(1, "h", 300.0)}:  # the table is looked at twice a second
                crew.look(0.01)
            crew.place(1, keep=keep)
            while len(asked) < 2:
                crew.look(0.01)
            assert asked == [{"n": 1}, {"m": 1}]
            assert set(crew.held().nodes) == ({"n"} if keep else set())
    finally:
        crew.close()


@pytest.mark.parametrize(("answers", "least_s", "most_s"), [(True, 0.95, 5.0), (False, 0.25, 0.9)])
def test_a_silent_agent_has_more_time_where_its_host_takes_connections(
    monkeypatch: pytest.MonkeyPatch, answers: bool, least_s: float, most_s: float
) -> None:
    monkeypatch.setattr("launch.controller.crew.CONTROLLER_SILENT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as door:

        class Reachable(OneNode):
            def door(self, node: str) -> tuple[str, int]:
                return ("127.0.0.1", door.getsockname()[1] if answers else 9)

        nodes = Reachable()
        crew = Crew(nodes, RankSetting("/run", ["rank"], "1:x"), NoLogs(), "127.0.0.1", 0.3)
        try:
            _launch(crew, nodes)
            with socket.create_connection(nodes.launched[0]) as agent:
                _greet(agent, crew, nodes)
                began = time.monotonic()
                while crew.held().nodes:
                    crew.look(0.01)
                assert least_s <= time.monotonic() - began < most_s
        finally:
            crew.close()


def test_the_end_gives_back_slots_whose_agent_was_not_heard_yet_and_waits_for_those_on_their_way():
    given_back: list[str] = []

    class Slow(OneNode):
        def release(self, node: str) -> None:
            time.sleep(0.3)
            given_back.append(node)

    nodes = Slow()
    crew = Crew(nodes, RankSetting("/run", ["rank"], "1:x"), NoLogs(), "127.0.0.1", 5.0)
    _launch(crew, nodes)
    crew.close()
    assert given_back == ["n"]


class LogsInAStore(NoLogs):
    def of(self, attempt: int, rank: int) -> dict[str, str | None]:
        return {"log": None, "log_url": "s3://bucket/run", "log_key": "log"}


def test_an_agent_that_copies_logs_into_a_store_is_not_ended_before_it_has():
    class Released(OneNode):
        def __init__(self) -> None:
            super().__init__()
            self.released: list[str] = []

        def release(self, node: str) -> None:
            self.released.append(node)

    nodes = Released()
    crew = Crew(nodes, RankSetting("/run", ["rank"], "1:x"), LogsInAStore(), "127.0.0.1", 5.0)
    _launch(crew, nodes)
    with _started(crew, nodes) as (_, heard):
        closing = threading.Thread(target=crew.close)
        closing.start()
        assert [next(heard)["kind"], next(heard)["kind"]] == ["reserve", "bye"]
        time.sleep(1.0)  # it copies
        assert nodes.released == []
        heard.close()
    ended = time.monotonic()
    closing.join(10.0)
    assert nodes.released == ["n"]
    assert time.monotonic() - ended < 2.0
