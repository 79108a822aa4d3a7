"""The agents of one controller as one body: get slots, start ranks, hear them, kill them.

Takes the controller's orders → what happened since the last look (`News`). Slots come from a `Nodes`
(Ray's placement groups; processes in tests); all later words go over the hub. Calls into `Nodes` run in
threads of their own: nothing here waits for Ray. An agent that is silent is lost, its node is left out
until Ray has had the time to notice. Own design (DESIGN section 7).
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from launch.controller.attempt import RankPlace, RankSetting, assign_ranks, choose_nodes, rank_environment
from launch.controller.hub import Hub
from launch.controller.state import Beat, RankExit, RankStack

AGENT_START_S = 60.0  # from the order for slots to the agent's first word
UNHEARD_S = 1.2  # an agent says something every 0.5 s
RELEASE_WITHIN_S = 5.0  # longest wait at the end for a Ray that may be dead itself
LOST_NODE_REST_S = 20.0  # Ray declares a killed node dead after 13 s (measured)


class Nodes(Protocol):
    """Where slots come from. Every method may block; none is called on the controller's thread."""

    def free_slots(self) -> dict[str, int]:
        """Slots that could be taken now, by node."""

    def launch(self, slots: Mapping[str, int], controller: tuple[str, int], secret: str) -> None:
        """Takes slots and starts an agent on each node. Raises SlotsTakenError when they are gone."""

    def release(self, node: str) -> None:
        """Gives the slots of a node back and ends its agent."""


class LogPlaces(Protocol):
    """Where the output of ranks goes."""

    def of(self, attempt: int, rank: int) -> dict[str, str | None]:
        """Fields `log` (local path or None), `log_url` and `log_key` (when not local) of a start order."""


class SlotsTakenError(Exception):
    """The slots that were asked for are not to be had now; ask again."""


@dataclass(slots=True)
class AgentView:
    """What is known of a connected agent."""

    number: int
    node: str
    host: str
    address: str
    slots: int
    standbys: int = 0  # that were asked for and are not known to be ready


@dataclass(slots=True)
class News:
    """What happened since the last look."""

    placed: tuple[str, ...] | None = None
    place_failed: str | None = None
    start_failed: str | None = None
    exits: list[RankExit] = field(default_factory=list)
    beats: list[Beat] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)
    processes: dict[int, dict[str, Any]] = field(default_factory=dict)  # rank -> identity, as spawned
    events: list[tuple[int, dict[str, Any]]] = field(default_factory=list)  # rank, event of its heartbeat pipe
    standbys_ready: int | None = None  # all that were asked for are ready now; how many
    stacks: list[RankStack] = field(default_factory=list)
    unheard: frozenset[int] = frozenset()  # ranks whose agent says nothing just now
    notes: list[str] = field(default_factory=list)  # what agents have to say to people


class Crew:
    """See the module. Used by the controller's thread only.

    Args:
        host: address of this node that the agents reach.
        agent_silent_s: silence after which an agent is lost.
        logs: where the output of ranks goes.
    """

    def __init__(self, nodes: Nodes, setting: RankSetting, logs: LogPlaces, host: str, agent_silent_s: float) -> None:
        self._nodes, self._setting, self._logs = nodes, setting, logs
        self._agent_silent_s = agent_silent_s
        self._secret = secrets.token_hex(32)
        self._hub = Hub(host, self._secret)
        self._agents: dict[int, AgentView] = {}
        self._wanted: dict[str, int] = {}  # node -> slots of agents that were launched and not heard of yet
        self._lost_t: dict[str, float] = {}
        self._order_t: float | None = None  # since when slots for `_order` are being got
        self._order = 0
        self._answers: queue.Queue[str] = queue.Queue()  # failures of launches
        self._places: list[RankPlace] = []
        self._attempt = 0
        self._word: str | None = None  # what the ranks of this attempt were told, for those that start later
        self._looked_t = time.monotonic()
        self._free: dict[str, int] | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch_free, name="free-slots", daemon=True).start()

    def free_ranks(self) -> int | None:
        """Ranks that could be placed now, on agents that live and on free slots; None while unknown."""
        living = sum(agent.slots for agent in self._agents.values())
        free = self._free_elsewhere()
        if free is None:
            return living or None
        return living + sum(free.values())

    def place(self, num_ranks: int) -> None:
        """Gets slots for `num_ranks` ranks; `placed` or `place_failed` will be news."""
        self._order, self._order_t = num_ranks, time.monotonic()
        self._answers = answers = queue.Queue[str]()  # a late answer to an older order is not heard
        missing = num_ranks - sum(agent.slots for agent in self._agents.values())
        if missing <= 0:
            self._hub.wake_reader()  # the answer is known: nobody need wait for a message
            return
        try:
            self._wanted = choose_nodes(self._free_elsewhere() or {}, missing)
        except ValueError as error:
            answers.put(str(error))
            return
        wanted = dict(self._wanted)

        def launch() -> None:
            try:
                self._nodes.launch(wanted, self._hub.address, self._secret)
            except SlotsTakenError as error:
                answers.put(str(error))
            except Exception as error:  # Ray raises many kinds; the order fails and is given again
                answers.put(f"{type(error).__name__}: {error}")

        threading.Thread(target=launch, name="launch", daemon=True).start()

    def start(self, attempt: int, num_ranks: int) -> None:
        """Starts the ranks of an attempt on the agents that were placed."""
        self._attempt, self._word = attempt, None
        self._places = assign_ranks({agent.number: agent.slots for agent in self._agents.values()}, num_ranks)
        self._hub.send(self._places[0].agent, {"kind": "reserve", "attempt": attempt})

    def stand_by(self) -> None:
        """Has a standby made for every rank of the attempt; `standbys_ready` will be news."""
        command, environment = list(self._setting.command), self._setting.fixed_environment()
        for agent in self._agents.values():
            agent.standbys = self._ranks_on(agent)
            order = {"kind": "standby", "count": agent.standbys, "command": command, "environment": environment}
            self._hub.send(agent.number, order)

    def take_stacks(self) -> None:
        """Asks every rank for its stacks; they will be news."""
        self._tell_all({"kind": "stacks"})

    def say(self, word: str) -> None:
        """Sends a word to every rank; those that are just being started get it too."""
        self._word = word
        self._tell_all({"kind": "word", "word": word})

    def kill(self) -> None:
        """Kills every rank; their exits will be news."""
        self._tell_all({"kind": "kill"})

    def close(self) -> None:
        """Ends all agents and gives their slots back."""
        self._closed.set()
        self._tell_all({"kind": "bye"})
        self._hub.close()
        releases = [
            threading.Thread(target=self._nodes.release, args=(agent.node,), name="release", daemon=True)
            for agent in self._agents.values()
        ]
        for release in releases:
            release.start()
        for release in releases:
            release.join(RELEASE_WITHIN_S)
        self._agents.clear()

    def look(self, timeout_s: float) -> News:
        """News since the last look; waits up to `timeout_s` for the first."""
        news = News()
        try:
            self._take(*self._hub.received.get(timeout=timeout_s), news)
            while True:
                self._take(*self._hub.received.get_nowait(), news)
        except queue.Empty:
            pass
        self._judge_silence(news)
        self._answer_order(news)
        return news

    def _take(self, number: int, message: dict[str, Any], news: News) -> None:
        kind = message.get("kind")
        if kind == "hello":
            node = str(message["node"])
            slots = self._wanted.pop(node, 0)
            if slots:  # an agent of an order that was given up is not wanted any more
                self._agents[number] = AgentView(number, node, message["host"], message["address"], slots)
            else:
                self._hub.send(number, {"kind": "bye"})
            return
        agent = self._agents.get(number)
        if agent is None:
            return
        if kind == "gone":
            self._lose(agent, f"the agent on {agent.host} ended", news)
        elif kind == "note":
            news.notes.append(str(message["message"]))
        elif message.get("attempt") != self._attempt:
            return
        elif kind == "standbys":
            self._count_standbys(agent, int(message["ready"]), news)
        elif kind == "port":
            self._start_ranks((agent.address, int(message["port"])))
        elif kind == "spawn_failed":
            news.start_failed = str(message["message"])
            news.exits.append(RankExit(int(message["rank"]), 6))
        elif kind == "spawned":
            news.processes[int(message["rank"])] = message["process"]
        elif kind == "stack":
            news.stacks.append(RankStack(int(message["rank"]), str(message["state"]), str(message["text"])))
        elif kind == "exit":
            news.exits.append(RankExit(int(message["rank"]), int(message["code"]), str(message["tail"])))
        elif kind == "lines":
            _read_lines(int(message["rank"]), message["lines"], news)

    def _start_ranks(self, master: tuple[str, int]) -> None:
        num_ranks = len(self._places)
        for agent in self._agents.values():
            ranks = [
                {
                    "rank": place.rank,
                    "environment": rank_environment(self._setting, place, num_ranks, master),
                    **self._logs.of(self._attempt, place.rank),
                }
                for place in self._places
                if place.agent == agent.number
            ]
            order = {
                "kind": "start",
                "attempt": self._attempt,
                "command": list(self._setting.command),
                "arguments": self._setting.arguments_of(self._attempt),
                "environment": self._setting.fixed_environment(),
                "ranks": ranks,
            }
            self._hub.send(agent.number, order)
        if self._word is not None:
            self._tell_all({"kind": "word", "word": self._word})

    def _ranks_on(self, agent: AgentView) -> int:
        return sum(place.agent == agent.number for place in self._places)

    def _count_standbys(self, agent: AgentView, ready: int, news: News) -> None:
        if ready < self._ranks_on(agent) or not agent.standbys:
            return
        agent.standbys = 0
        if not any(other.standbys for other in self._agents.values()):
            news.standbys_ready = len(self._places)

    def _judge_silence(self, news: News) -> None:
        now = time.monotonic()
        slept, self._looked_t = now - self._looked_t > self._agent_silent_s / 2, now
        if slept:  # this process itself did not run; what the agents said meanwhile is unread
            return
        unheard = {number for number in self._agents if self._hub.silent_s(number) > UNHEARD_S}
        news.unheard = frozenset(place.rank for place in self._places if place.agent in unheard)
        for agent in list(self._agents.values()):
            silent_s = self._hub.silent_s(agent.number)
            if silent_s > self._agent_silent_s:
                self._lose(agent, f"node {agent.host} is lost: its agent was silent for {silent_s:.1f} s", news)

    def _lose(self, agent: AgentView, what: str, news: News) -> None:
        del self._agents[agent.number]
        self._lost_t[agent.node] = time.monotonic()
        self._hub.drop(agent.number)
        for place in self._places:
            if place.agent == agent.number:
                news.lost[place.rank] = what
        threading.Thread(target=self._nodes.release, args=(agent.node,), name="release", daemon=True).start()

    def _answer_order(self, news: News) -> None:
        if self._order_t is None:
            return
        agents = list(self._agents.values())
        if sum(agent.slots for agent in agents) >= self._order:
            self._order_t = None
            places = assign_ranks({agent.number: agent.slots for agent in agents}, self._order)
            news.placed = tuple(self._agents[place.agent].host for place in places)
            return
        failure = None if self._answers.empty() else self._answers.get()
        if failure is None and time.monotonic() - self._order_t > AGENT_START_S:
            failure = f"no agent answered within {AGENT_START_S:g} s"
            for node in self._wanted:
                self._lost_t[node] = time.monotonic()
        if failure is not None:
            news.place_failed, self._order_t = failure, None
            abandoned, self._wanted = self._wanted, {}
            for node in abandoned:
                threading.Thread(target=self._nodes.release, args=(node,), name="release", daemon=True).start()

    def _tell_all(self, message: dict[str, Any]) -> None:
        for number in self._agents:
            self._hub.send(number, message)

    def _free_elsewhere(self) -> dict[str, int] | None:
        if self._free is None:
            return None
        now = time.monotonic()
        held = {agent.node for agent in self._agents.values()}
        return {
            node: slots
            for node, slots in self._free.items()
            if node not in held and now - self._lost_t.get(node, -LOST_NODE_REST_S) >= LOST_NODE_REST_S
        }

    def _watch_free(self) -> None:
        while not self._closed.is_set():
            try:
                self._free = self._nodes.free_slots()
            except Exception:  # Ray's table cannot be read now: unknown, not none
                self._free = None
            self._closed.wait(1.0)


def _read_lines(rank: int, lines: list[dict[str, Any]], news: News) -> None:
    for line in lines:
        if "event" in line:
            news.events.append((rank, line))
        elif isinstance(line.get("phase"), str) and isinstance(line.get("step"), int):
            t, own_s = (line.get(name) if isinstance(line.get(name), float) else None for name in ("t", "own_s"))
            news.beats.append(Beat(rank, line["phase"], line["step"], int(line.get("collective", 0)), t, own_s))
