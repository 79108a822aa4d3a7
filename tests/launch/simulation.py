"""A cluster of thousands of nodes in a few seconds: the real policy, a made-up world, a clock that jumps.

Takes a seed → faults drawn from it: nodes that die and come back, links that are cut, ranks that crash or hang,
nodes that are taken away with notice, one host that is bad. The world tells the policy only what a controller
can see, checks the invariants at each action and adds up where the time went.
"""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

from launch.controller.offers import Offer, Seat, Slots
from launch.controller.policy import decide
from launch.controller.state import (
    AskRanks,
    Beat,
    Cause,
    Finish,
    KillRanks,
    Limits,
    Observation,
    Outcome,
    Phase,
    Place,
    Quarantine,
    RankExit,
    RecordFault,
    RunState,
    StandBy,
    StartRanks,
    TakeStacks,
)

DAY_S = 86400.0
STEP_S = 10.0
COMMIT_STEPS = 120
START_S = 40.0  # from spawn to the first step
SAVE_S = 20.0
RAY_SEES_S = 13.0  # a dead node stays in Ray's table for so long
SILENT_S = 3.0
BEAT_S = 900.0

LIMITS = Limits(
    num_ranks=4000,
    min_ranks=3000,
    max_failures={Cause.APPLICATION: 10, Cause.NODE: 50, Cause.HANG: 5, Cause.PREEMPTION: 100},
    backoff_s=0.5,
    heartbeat_timeout_s=2 * BEAT_S,
    start_timeout_s=600.0,
    spare_ranks=32,
    standbys=True,
)


@dataclass(frozen=True)
class Rates:
    """Events a day in the whole cluster, about as many as published reports of large runs have for such a size."""

    node_deaths: float = 4.0
    cuts: float = 1.0
    crashes: float = 2.0
    hangs: float = 0.5
    drains: float = 2.0
    bad_host: float = 6.0  # crashes of ranks of one host
    config_error_day: float | None = None


@dataclass
class Totals:
    """What came of it."""

    faults: int = 0
    hangs: int = 0
    attempts: int = 0
    moves: int = 0
    steps_redone: int = 0
    down_s: float = 0.0  # from a fault to the next step, detection included; without what began with a hang
    longest_down_s: float = 0.0
    longest_hang_s: float = 0.0
    decisions: int = 0
    quarantined: list[str] = field(default_factory=list)
    smallest: int = LIMITS.num_ranks


class World:
    """See the module."""

    def __init__(self, seed: int, num_nodes: int, rates: Rates, limits: Limits = LIMITS) -> None:
        self.random = random.Random(seed)
        self.limits, self.rates, self.num_nodes = limits, rates, num_nodes
        self.now, self.state, self.totals = 0.0, RunState(), Totals()
        self._queue: list[tuple[float, int, str, Any]] = []
        self._numbers = itertools.count()
        self.host = {f"n{i}": f"h{i}" for i in range(num_nodes)}  # in order: a set's differs in every process
        self.alive = set(self.host)
        self.offers = {node: Offer(1, host) for node, host in self.host.items()}
        self.held: dict[str, Offer] = {}
        self.changed = True
        self.ranks: dict[int, str] = {}  # rank -> node, of the attempt that runs
        self.step = self.committed = self.restored = 0
        self.training = False  # steps are being done
        self.step_t = 0.0  # when the step that is being done began
        self.first_down_t: float | None = 0.0
        self.config_error = False
        self.outcome: Outcome | None = None
        self.attempt = 0
        self.hung = (-1, -1)  # attempt and rank
        for kind in ("node_deaths", "cuts", "crashes", "hangs", "drains", "bad_host"):
            self._next(kind)
        self._push(60.0, "beats")
        if rates.config_error_day is not None:
            self._push(rates.config_error_day * DAY_S, "config_error")

    # ------------------------------------------------------------------------------------- the clock

    def _push(self, after_s: float, kind: str, data: Any = None) -> None:
        heapq.heappush(self._queue, (self.now + after_s, next(self._numbers), kind, data))

    def _next(self, kind: str) -> None:
        rate = getattr(self.rates, kind)
        if rate:
            self._push(self.random.expovariate(rate / DAY_S), kind)

    def play(self, days: float) -> Totals:
        """Lets the world run."""
        self._decide()
        while self._queue and self._queue[0][0] < days * DAY_S and self.outcome is None:
            before = self.now
            self.now, _, kind, data = heapq.heappop(self._queue)
            assert self.now >= before
            if self.training:
                done = int((self.now - self.step_t) / STEP_S)
                self.step, self.step_t = self.step + done, self.step_t + done * STEP_S
            getattr(self, f"_on_{kind}")(data)
        return self.totals

    def _decide(self, **seen: Any) -> None:
        if self.changed:
            self.changed, self.counted = False, (Slots.of(dict(self.held)), Slots.of(dict(self.offers)))
        observation = Observation(held=self.counted[0], offers=self.counted[1], **seen)
        self.state, actions = decide(self.state, observation, self.now, self.limits)
        self.totals.decisions += 1
        for action in actions:
            self._obey(action)
        state = self.state
        if state.phase is Phase.WAITING:
            self._push(max(0.0, state.retry_t - self.now) + 0.01, "tick", state.phase)
        elif state.phase is Phase.PLACING and not state.asked:
            self._push(1.0, "tick", state.phase)
        elif state.phase is Phase.SUSPECTING:
            self._push(self.limits.suspect_grace_s, "tick", state.phase)

    def _on_tick(self, phase: Phase) -> None:
        if self.state.phase is phase:
            self._decide()

    # ------------------------------------------------------------------------------------ the faults

    def _some_node(self) -> str:
        while (node := f"n{self.random.randrange(self.num_nodes)}") not in self.alive:
            pass
        return node

    def _victim(self) -> tuple[int, str] | None:
        """A rank of the attempt on a node that lives."""
        if not self.ranks or self.state.phase is not Phase.RUNNING:
            return None
        rank = self.random.choice(list(self.ranks))
        return (rank, self.ranks[rank]) if self.ranks[rank] in self.alive else None

    def _on_node_deaths(self, _: Any) -> None:
        self._lose_node(self._some_node(), self.random.expovariate(1 / 7200.0))
        self._next("node_deaths")

    def black_out(self, *, after_s: float, share: float) -> None:
        """A share of all nodes is gone for a week."""
        for number in range(int(share * self.num_nodes)):
            self._push(after_s + number * 1e-4, "blackout", f"n{number}")

    def _on_blackout(self, node: str) -> None:
        self._lose_node(node, 7 * DAY_S)

    def _on_cuts(self, _: Any) -> None:
        self._lose_node(self._some_node(), self.random.uniform(60.0, 600.0))
        self._next("cuts")

    def _lose_node(self, node: str, back_s: float) -> None:
        self.alive.discard(node)
        if node in self.ranks.values():
            self._stand_still()
        if node in self.held:
            self._push(SILENT_S, "silence", node)
        else:
            self._push(RAY_SEES_S, "seen_dead", node)
        self._push(max(back_s, 60.0), "back", node)

    def _on_silence(self, node: str) -> None:
        if self.held.pop(node, None) is not None:
            self.changed = True
            lost = [rank for rank, where in self.ranks.items() if where == node]
            for rank in lost:
                del self.ranks[rank]
            self._decide(lost=dict.fromkeys(lost, f"node {self.host[node]} is lost"))

    def _on_seen_dead(self, node: str) -> None:
        if node not in self.alive:
            self.offers.pop(node, None)
            self.changed = True

    def _on_back(self, node: str) -> None:
        self.changed = True
        self.alive.add(node)
        self.offers[node] = Offer(1, self.host[node])
        self._decide()

    def _on_crashes(self, _: Any) -> None:
        self._end_rank(self._victim(), self.random.choice([1, 3, -9, -11]))
        self._next("crashes")

    def _on_bad_host(self, _: Any) -> None:
        found = [(rank, node) for rank, node in self.ranks.items() if node == "n7" and node in self.alive]
        self._end_rank(found[0] if found and self.state.phase is Phase.RUNNING else None, -7)
        self._next("bad_host")

    def _on_config_error(self, _: Any) -> None:
        if self.training:
            self.config_error = True
            self._end_rank(self._victim(), 2)
        else:
            self._push(100.0, "config_error")

    def _end_rank(self, victim: tuple[int, str] | None, code: int) -> None:
        if victim is None:
            return
        del self.ranks[victim[0]]
        self._stand_still()
        self._decide(exits=(RankExit(victim[0], code),))

    def _on_hangs(self, _: Any) -> None:
        victim = self._victim()
        if victim and self.training:
            self.hung = (self.attempt, victim[0])  # all others wait for it; it alone gives no sign of life any more
            self.totals.hangs += 1
            self._stand_still()
        self._next("hangs")

    def _stand_still(self) -> None:
        """A rank of the attempt is out: no step ends any more, and what follows is waste."""
        self.training = False
        self.first_down_t = self.now if self.first_down_t is None else self.first_down_t

    def _on_drains(self, _: Any) -> None:
        node = self._some_node()
        self.changed = True
        left_s = self.random.choice([0.0, 30.0, 120.0])
        for table in (self.held, self.offers):
            if node in table:
                table[node] = Offer(1, self.host[node], left_s)
        self._push(left_s + 30.0, "taken", node)
        self._decide()
        self._next("drains")

    def _on_taken(self, node: str) -> None:
        if node in self.alive:
            self._lose_node(node, 3600.0)

    # ------------------------------------------------------------------------------------ the actions

    def _obey(self, action: Any) -> None:
        assert self.outcome is None, f"{action} after the end"
        match action:
            case Place():
                self._place(action)
            case StartRanks():
                self._start(action)
            case TakeStacks():
                self._push(1.1, "tick", Phase.EXAMINING)
            case StandBy():
                self._push(30.0, "standbys", self.attempt)
            case AskRanks():
                self.totals.moves += 1
                self._push(STEP_S + SAVE_S, "saved", self.attempt)
            case KillRanks():
                self._stand_still()
                self._push(0.5, "killed", self.attempt)
            case RecordFault():
                self.totals.faults += 1
            case Quarantine(host):
                self.totals.quarantined.append(host)
            case Finish(outcome):
                assert not self.ranks or self.state.phase is Phase.ENDED
                self.outcome = outcome

    def _place(self, order: Place) -> None:
        self.changed = True
        unfit = [n for n, o in self.held.items() if o.host in order.without or o.leaving_s is not None]
        given_up = [] if order.keep else unfit
        for node in given_up:
            self.offers[node] = self.held.pop(node)
        missing = order.num_ranks - len(self.held)
        free = [n for n, o in self.offers.items() if o.host not in order.without and o.leaving_s is None]
        self._push(0.1 if missing <= 0 else 4.0, "placed", (order, free[: max(0, missing)]))

    def _on_placed(self, data: tuple[Place, list[str]]) -> None:
        order, chosen = data
        self.changed = True
        if self.state.phase not in (Phase.PLACING, Phase.RUNNING) or not self.state.asked:
            return
        for node in chosen:
            if node in self.alive and node in self.offers:
                self.held[node] = self.offers.pop(node)
            else:
                self.offers.pop(node, None)
        if len(self.held) < order.num_ranks:
            self._decide(place_failed="the slots were taken meanwhile")
            return
        nodes = list(itertools.islice(self.held, order.num_ranks))
        assert order.keep or not {self.host[node] for node in nodes} & order.without
        self.nodes = nodes
        self._decide(placed=tuple(Seat(node, self.host[node]) for node in nodes))

    def _start(self, order: StartRanks) -> None:
        assert not self.config_error, "a config error was tried again"
        assert not any(node in self.alive for node in self.ranks.values()), "ranks of an older attempt live"
        assert order.attempt == self.attempt + 1
        assert order.num_ranks >= self.limits.min_ranks
        assert self.state.committed_step == (self.committed or -1), "a commit was lost"
        hosts = {self.host[node] for node in self.nodes[: order.num_ranks]}
        assert not hosts & self.state.quarantined
        self.attempt, self.totals.attempts = order.attempt, self.totals.attempts + 1
        self.totals.smallest = min(self.totals.smallest, order.num_ranks)
        self.ranks = dict(enumerate(self.nodes[: order.num_ranks]))
        self.totals.steps_redone += self.step - self.committed
        self.step = self.restored = self.committed
        self._push(START_S, "training", self.attempt)

    def _on_training(self, attempt: int) -> None:
        if attempt != self.attempt or self.state.phase is not Phase.RUNNING:
            return
        self.training, self.step_t = True, self.now
        if self.first_down_t is not None:
            down_s = self.now - self.first_down_t
            if self.hung[0] == attempt - 1:
                self.totals.longest_hang_s = max(self.totals.longest_hang_s, down_s)
            else:
                self.totals.down_s += down_s
                self.totals.longest_down_s = max(self.totals.longest_down_s, down_s)
            self.first_down_t = None
        for step in (self.step, self.step + 1):
            self._decide(beats=tuple(Beat(rank, "step", step) for rank in self.ranks))
        self._push(STEP_S * (COMMIT_STEPS - self.step % COMMIT_STEPS) + SAVE_S, "commit", attempt)

    def _on_commit(self, attempt: int) -> None:
        if attempt != self.attempt or not self.training:
            return
        self.committed = self.step - self.step % COMMIT_STEPS
        self._push(STEP_S * COMMIT_STEPS, "commit", attempt)
        self._decide(committed_step=self.committed)

    def _on_beats(self, _: Any) -> None:
        self._push(BEAT_S, "beats")
        hangs = self.hung[0] == self.attempt and self.state.phase is Phase.RUNNING
        if self.training or hangs:
            silent = self.hung[1] if hangs else None
            self._decide(beats=tuple(Beat(rank, "step", self.step) for rank in self.ranks if rank != silent))

    def _on_standbys(self, attempt: int) -> None:
        if attempt == self.attempt:
            self._decide(standbys=len(self.held))

    def _on_saved(self, attempt: int) -> None:
        """The ranks were asked to save and end, and did."""
        if attempt != self.attempt or not self.training or not self.state.moving:
            return
        self._stand_still()
        self.committed = self.step
        ended = tuple(RankExit(rank, 5) for rank in self.ranks)
        self.ranks = {}
        self._decide(committed_step=self.committed, exits=ended)

    def _on_killed(self, attempt: int) -> None:
        if attempt == self.attempt:
            ended = tuple(RankExit(rank, -9) for rank in self.ranks)
            self.ranks = {}
            self._decide(exits=ended)
