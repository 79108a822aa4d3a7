"""The agents of one controller as one body: get slots, start ranks, hear them, kill them.

Takes the controller's orders → what happened since the last look (`News`). Slots come from a `Nodes`
(Ray's placement groups; processes in tests) through `SlotTable`; all later words go over the hub. Calls
into `Nodes` run in threads of their own: nothing here waits for Ray. An agent that is silent is lost, its
node is left out until it answers again. Own design (DESIGN section 7).
"""

from __future__ import annotations

import math
import queue
import secrets
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

from launch.agents.wire import CONTROLLER_SILENT_S
from launch.controller.attempt import RankPlace, RankSetting, assign_ranks, choose_nodes, rank_environment
from launch.controller.hub import Hub
from launch.controller.news import News, read_lines
from launch.controller.offers import NO_SLOTS, Offer, Seat, Slots
from launch.controller.slots import Nodes, SlotsTakenError, SlotTable
from launch.controller.state import RankExit, RankStack

# From the order for slots to the first word of an agent. Ray may have to start an interpreter from a cold network file
# system, or on cores that others use: what is given up too early begins anew, and never comes (measured at 60 s).
AGENT_START_S = 180.0
UNHEARD_S = 1.2  # an agent says something every 0.5 s
RELEASE_WITHIN_S = 5.0  # longest wait at the end for a Ray that may be dead itself
MESSAGES_PER_LOOK = 256  # 10 ms of them: thousands of ranks may all say something at once
COPIES_WITHIN_S = 12.0  # an agent that ends copies logs into an object store for up to 10 s; Ray would kill it at once


class LogPlaces(Protocol):
    """Where the output of ranks goes."""

    def of(self, attempt: int, rank: int) -> dict[str, str | None]:
        """Fields `log` (local path or None), `log_url` and `log_key` (when not local) of a start order."""

    def of_evaluator(self) -> dict[str, str | None]:
        """The same for the process that measures checkpoints."""


@dataclass(slots=True)
class AgentView:
    """What is known of a connected agent."""

    number: int
    node: str
    host: str
    address: str
    slots: int
    standbys: int = 0  # that are ready


@dataclass(slots=True, eq=False)
class _Wanted:
    """An agent that was launched and has not been heard of."""

    slots: int
    since_t: float


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
        self._table = SlotTable(nodes)
        self._wanted: dict[str, _Wanted] = {}  # by node: agents that were launched and not heard of yet
        self._held: tuple[object, Slots] = (None, NO_SLOTS)
        self._offered: tuple[object, Slots | None] = (None, None)
        self._order: int | None = None  # slots that are being got, living ones included
        self._failure: str | None = None  # why a launch failed that the order needs
        self._answers: queue.Queue[tuple[dict[str, _Wanted], str]] = queue.Queue()  # failures of launches
        self._places: list[RankPlace] = []
        self._releases: list[threading.Thread] = []  # of slots, under way
        self._standing = False  # standbys were asked for and are not all ready
        self._evaluator: int | None = None  # the agent whose slot it has
        self._evaluator_lost = False  # and it is not there any more, which is not told yet
        self._attempt = 0
        self._word: str | None = None  # what the ranks of this attempt were told, for those that start later
        self._looked_t = time.monotonic()

    def held(self) -> Slots:
        """Slots on living agents."""
        version = (self._table.version, tuple(self._agents))
        if version != self._held[0]:
            leaving = self._table.leaving_s
            agents = self._agents.values()
            nodes = {agent.node: Offer(agent.slots, agent.host, leaving(agent.node)) for agent in agents}
            self._held = (version, Slots.of(nodes))
        return self._held[1]

    def offers(self) -> Slots | None:
        """Slots that could be taken besides; None while unknown."""
        version = (self._table.version, tuple(self._agents), tuple(self._wanted))
        if version != self._offered[0]:
            table = self._table.offers()
            taken = {agent.node for agent in self._agents.values()} | set(self._wanted)
            free = None if table is None else {node: offer for node, offer in table.items() if node not in taken}
            self._offered = (version, None if free is None else Slots.of(free))
        return self._offered[1]

    def place(self, num_ranks: int, without: frozenset[str] = frozenset(), *, keep: bool = False) -> None:
        """Gets slots for `num_ranks` ranks; `placed` or `place_failed` will be news.

        Args:
            without: hosts that are not taken; nodes that leave are not either.
            keep: agents that are there already go on; otherwise they are ended.
        """
        unfit = [a for a in self._agents.values() if a.host in without or self._table.leaving_s(a.node) is not None]
        if not keep:
            for agent in unfit:
                self._dismiss(agent)
            unfit = []
        self._order, self._failure = num_ranks, None
        fit = self._slots() - sum(agent.slots for agent in unfit)
        missing = num_ranks - fit - sum(wanted.slots for wanted in self._wanted.values())
        if missing <= 0:
            self._hub.wake_reader()  # the answer may be known: nobody need wait for a message
            return
        offers = self.offers() or NO_SLOTS
        free = {n: o.slots for n, o in offers.nodes.items() if o.host not in without and o.leaving_s is None}
        try:
            chosen = choose_nodes(free, missing)
        except ValueError as error:
            self._failure = str(error)
            return
        now = time.monotonic()
        wanted = {node: _Wanted(slots, now) for node, slots in chosen.items()}
        self._wanted.update(wanted)
        threading.Thread(target=self._launch, args=(chosen, wanted), name="launch", daemon=True).start()

    def _launch(self, chosen: dict[str, int], wanted: dict[str, _Wanted]) -> None:
        try:
            self._nodes.launch(chosen, self._hub.address, self._secret)
        except SlotsTakenError as error:
            for node in error.nodes:
                self._table.rest(node, closed=True)  # until it has answered: Ray may not know yet that it is dead
            self._answers.put((wanted, str(error)))
        except Exception as error:  # Ray raises many kinds; the order fails and is given again
            self._answers.put((wanted, f"{type(error).__name__}: {error}"))

    def _slots(self) -> int:
        return sum(agent.slots for agent in self._agents.values())

    def start(self, attempt: int, num_ranks: int) -> None:
        """Starts the ranks of an attempt on the agents that were placed."""
        self._attempt, self._word = attempt, None
        self._places = assign_ranks({agent.number: agent.slots for agent in self._agents.values()}, num_ranks)
        if self._evaluator is not None and self._evaluator not in self._free():
            self._hub.send(self._evaluator, {"kind": "evaluate", "run": None})
        self._hub.send(self._places[0].agent, {"kind": "reserve", "attempt": attempt})

    def stand_by(self) -> None:
        """Has a standby made for every slot; `standbys` and in the end `standbys_ready` will be news."""
        command, environment = list(self._setting.command), self._setting.fixed_environment()
        self._standing = True
        for agent in self._agents.values():
            agent.standbys = 0
            order = {"kind": "standby", "count": agent.slots, "command": command, "environment": environment}
            self._hub.send(agent.number, order)

    def evaluate(self) -> None:
        """Has a process measure the run's checkpoints on a slot without a rank; its end will be news."""
        self._evaluator = next(iter(self._free()), None)
        self._evaluator_lost = self._evaluator is None
        if self._evaluator is not None:
            order = {"run": self._setting.run_url, "environment": self._setting.fixed_environment()}
            self._hub.send(self._evaluator, {"kind": "evaluate", **order, **self._logs.of_evaluator()})

    def _free(self) -> list[int]:
        """Agents with a slot that no rank has."""
        taken = Counter(place.agent for place in self._places)
        return [agent.number for agent in self._agents.values() if agent.slots > taken[agent.number]]

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
        """Ends all agents, also those that have not been heard of yet, and gives their slots back."""
        self._table.close()
        self._tell_all({"kind": "bye"})
        for agent in self._agents.values():
            self._release(agent.node, agent.number)
        for node in self._wanted:
            self._release(node)
        deadline = time.monotonic() + RELEASE_WITHIN_S + self._copies_within_s()
        for release in self._releases:
            release.join(max(0.0, deadline - time.monotonic()))
        self._hub.close()
        self._agents.clear()

    def look(self, timeout_s: float) -> News:
        """News since the last look; waits up to `timeout_s` for the first. Of very much news a part, so that no look
        takes long; the next one goes on at once."""
        news = News()
        try:
            self._take(*self._hub.received.get(timeout=timeout_s), news)
            for _ in range(MESSAGES_PER_LOOK - 1):
                self._take(*self._hub.received.get_nowait(), news)
            news.is_part = True
        except queue.Empty:
            pass
        self._judge_silence(news)
        self._answer_order(news)
        if self._evaluator_lost:
            news.evaluator_code, self._evaluator_lost = 0, False
        return news

    def _take(self, number: int, message: dict[str, Any], news: News) -> None:
        kind = message.get("kind")
        if kind == "hello":
            node = str(message["node"])
            wanted = self._wanted.pop(node, None)
            if wanted:  # an agent of an order that was given up is not wanted any more
                self._agents[number] = AgentView(number, node, message["host"], message["address"], wanted.slots)
            else:
                self._hub.send(number, {"kind": "bye"})
            return
        agent = self._agents.get(number)
        if agent is None:
            return
        if kind == "gone":
            self._lose(agent, f"the agent on {agent.host} ended", news, closed=True)
        elif kind == "failed":
            self._lose(agent, f"the agent on {agent.host} failed: {message['message']}", news, closed=True)
        elif kind == "note":
            news.notes.append(str(message["message"]))
        elif kind == "standbys":  # also from an agent that has had no rank yet
            self._count_standbys(agent, int(message["ready"]), news)
        elif kind == "evaluated":
            news.evaluator_code, self._evaluator = int(message["code"]), None
        elif message.get("attempt") != self._attempt:
            return
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
            read_lines(int(message["rank"]), message["lines"], news)

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

    def _count_standbys(self, agent: AgentView, ready: int, news: News) -> None:
        agent.standbys = ready
        news.standbys = sum(min(other.standbys, other.slots) for other in self._agents.values())
        if self._standing and news.standbys >= self._slots():
            self._standing, news.standbys_ready = False, news.standbys

    def _judge_silence(self, news: News) -> None:
        now = time.monotonic()
        slept, self._looked_t = now - self._looked_t > self._agent_silent_s / 2, now
        if slept:  # this process itself did not run; what the agents said meanwhile is unread
            return
        unheard = {number for number in self._agents if self._hub.silent_s(number) > UNHEARD_S}
        news.unheard = frozenset(place.rank for place in self._places if place.agent in unheard)
        for agent in list(self._agents.values()):
            silent_s = self._hub.silent_s(agent.number)
            if silent_s > self._agent_silent_s / 2 and self._is_lost(agent, silent_s):
                self._lose(agent, f"node {agent.host} is lost: its agent was silent for {silent_s:.1f} s", news)

    def _is_lost(self, agent: AgentView, silent_s: float) -> bool:
        """Judges a silence: a host that takes connections is there, only its agent gets no time on a busy machine."""
        answered = self._table.probe(agent.node)
        if answered:
            return silent_s > max(self._agent_silent_s, CONTROLLER_SILENT_S)
        return silent_s > self._agent_silent_s

    def _lose(self, agent: AgentView, what: str, news: News, *, closed: bool = False) -> None:
        places = [place for place in self._places if place.agent == agent.number]
        for place in places:
            news.lost[place.rank] = what
        if not places:
            news.notes.append(f"{what}; it had no ranks")
        self._table.rest(agent.node, closed=closed)
        self._drop(agent)

    def _dismiss(self, agent: AgentView) -> None:
        """Ends an agent that is not wanted any more."""
        self._hub.send(agent.number, {"kind": "bye"})
        self._drop(agent, ending=True)

    def _drop(self, agent: AgentView, *, ending: bool = False) -> None:
        del self._agents[agent.number]
        if self._evaluator == agent.number:
            self._evaluator, self._evaluator_lost = None, True
        self._places = [place for place in self._places if place.agent != agent.number]
        if not ending:
            self._hub.drop(agent.number)
        self._release(agent.node, agent.number if ending else None)

    def _release(self, node: str, ending: int | None = None) -> None:
        """Gives a node back; before that an agent that was told to end may copy its logs."""
        release = threading.Thread(target=self._give_back, args=(node, ending), name="release", daemon=True)
        self._releases = [*(other for other in self._releases if other.is_alive()), release]
        release.start()

    def _give_back(self, node: str, ending: int | None) -> None:
        deadline = time.monotonic() + self._copies_within_s()
        while ending is not None and self._hub.silent_s(ending) < math.inf and time.monotonic() < deadline:
            time.sleep(0.02)
        if ending is not None:
            self._hub.drop(ending)
        self._nodes.release(node)

    def _copies_within_s(self) -> float:
        return COPIES_WITHIN_S if self._attempt and self._logs.of(self._attempt, 0)["log"] is None else 0.0

    def _answer_order(self, news: News) -> None:
        now = time.monotonic()
        while not self._answers.empty():
            wanted, failure = self._answers.get()
            self._give_up([node for node, entry in wanted.items() if self._wanted.get(node) is entry], failure)
        late = [node for node, entry in self._wanted.items() if now - entry.since_t > AGENT_START_S]
        if late:
            for node in late:
                self._table.rest(node)
            self._give_up(late, f"no agent answered within {AGENT_START_S:g} s")
        if self._order is None:
            return
        if self._slots() >= self._order:
            places = assign_ranks({agent.number: agent.slots for agent in self._agents.values()}, self._order)
            agents = [self._agents[place.agent] for place in places]
            news.placed, self._order = tuple(Seat(agent.node, agent.host) for agent in agents), None
        elif self._failure is not None or self._slots() + sum(w.slots for w in self._wanted.values()) < self._order:
            news.place_failed = self._failure or "agents were lost meanwhile"
            self._order = self._failure = None

    def _give_up(self, nodes: list[str], failure: str) -> None:
        """Agents that were launched and will not be there; the order that needs them fails."""
        for node in nodes:
            del self._wanted[node]
            self._release(node)
        self._failure = failure if nodes else self._failure

    def _tell_all(self, message: dict[str, Any]) -> None:
        for number in self._agents:
            self._hub.send(number, message)
