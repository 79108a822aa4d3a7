"""The rank processes of an attempt on one node: from a standby where one fits, else spawned.

Takes orders → `spawned`, `lines` and `exit` messages for the controller. A standby counts as a rank once
it has answered; one that dies or is silent before that is replaced by a new process, and nobody is
blamed. Used by the agent's one thread. Own design (DESIGN section 7).
"""

from __future__ import annotations

import functools
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from launch.agents.process import Child, RankOrder, Tell, read_from, size_of, spawn_rank, state_of, tail_of
from launch.agents.standbys import TAKEN_WITHIN_S, Standbys, hand_over
from pretrain.faults import passing
from pretrain.rundir import identify_process
from pretrain.train.watch import STACKS_SIGNAL

STACKS_WITHIN_S = 0.3  # a rank that can run writes them within milliseconds
STACK_BYTES = 64 * 1024
LOOK_EVERY_S = 0.5  # at whether processes are stopped


@dataclass(slots=True)
class _Rank:
    order: RankOrder
    child: Child
    answer_until_t: float | None = None  # a standby that has not answered yet; None: it is a rank
    killed: bool = False
    log_bytes: int = 0  # of its log before it was asked for its stacks
    stopped: bool = False  # its process, when it was last looked at
    output: IO[bytes] | None = None  # what it printed as a standby

    @property
    def was_standby(self) -> bool:
        return self.output is not None


class Ranks:
    """See the module.

    Args:
        inherited: environment that every rank inherits.
    """

    def __init__(
        self, inherited: Mapping[str, str], standbys: Standbys, selector: selectors.BaseSelector, tell: Tell
    ) -> None:
        self._inherited, self._standbys, self._selector, self._tell = inherited, standbys, selector, tell
        self._ranks: dict[int, _Rank] = {}
        self._listener: socket.socket | None = None
        self._word: str | None = None
        self._stacks_t: float | None = None  # when what the ranks wrote about their stacks is read
        self._looked_t = 0.0

    def start(self, orders: Sequence[RankOrder], listener: socket.socket | None) -> None:
        """Starts the ranks of an attempt; takes the listening socket of rank 0 over."""
        self._listener, self._word = listener, None
        for order in orders:
            if not self._take_standby(order):
                self._spawn(order)
        self._let_go_of_listener()

    def say(self, word: str) -> None:
        """Sends a word to every rank, also to one that has to be spawned again."""
        self._word = word
        for rank in self._ranks.values():
            rank.child.say(word)

    def ask_stacks(self) -> None:
        """Has every rank write its stacks into its log; they are sent a moment later."""
        self._stacks_t = time.monotonic() + STACKS_WITHIN_S
        for rank in self._ranks.values():
            rank.log_bytes = size_of(rank.order.log)
            rank.child.signal(STACKS_SIGNAL)

    def kill(self) -> None:
        for rank in self._ranks.values():
            rank.killed = True
            rank.child.kill()

    def check(self) -> None:
        """Kills standbys that do not answer; their end makes room for a new process."""
        now = time.monotonic()
        if self._stacks_t is not None and now > self._stacks_t:
            self._stacks_t = None
            for number, rank in self._ranks.items():
                text = read_from(rank.order.log, rank.log_bytes, STACK_BYTES)
                self._tell(number, "stack", state=state_of(rank.child.pid), text=text)
        for rank in self._ranks.values():
            if rank.answer_until_t is not None and now > rank.answer_until_t:
                rank.child.kill()
        if now - self._looked_t >= LOOK_EVERY_S:
            self._looked_t = now
            self._look_for_stopped()

    def _look_for_stopped(self) -> None:
        """Tells of a rank whose process was stopped, or goes on: its silence is no slow disk's, whatever its phase."""
        for number, rank in self._ranks.items():
            stopped = state_of(rank.child.pid) == "T"
            if stopped != rank.stopped:
                rank.stopped = stopped
                self._tell(number, "stack", state="T" if stopped else "S", text="")

    def close(self) -> None:
        """Kills and reaps all."""
        self.kill()
        for number in list(self._ranks):
            self._hear_end(number)
        self._let_go_of_listener()

    def _take_standby(self, order: RankOrder) -> bool:
        standby = self._standbys.take(order)
        if standby is None:
            return False
        rank = _Rank(order, standby.child, time.monotonic() + TAKEN_WITHIN_S, output=standby.output)
        self._ranks[order.rank] = rank
        self._watch(rank)
        try:
            hand_over(standby, order, self._listener.fileno() if self._listener and order.rank == 0 else None)
        except OSError:  # it is gone, or stuck: its end makes room for a new process
            standby.child.kill()
        return True

    def _spawn(self, order: RankOrder) -> None:
        try:
            child = spawn_rank(order, self._inherited, self._listener if order.rank == 0 else None)
        except OSError as error:
            self._tell(order.rank, "spawn_failed", message=f"rank {order.rank} on {socket.gethostname()}: {error}")
            return
        rank = self._ranks[order.rank] = _Rank(order, child)
        self._watch(rank)
        self._begin(rank)

    def _begin(self, rank: _Rank) -> None:
        rank.answer_until_t = None
        process = {**identify_process(rank.child.pid).to_json(), "standby": rank.was_standby}
        self._tell(rank.order.rank, "spawned", process=process)
        passing("agent.spawned")

    def _watch(self, rank: _Rank) -> None:
        number = rank.order.rank
        hear: Callable[[], None] = functools.partial(self._hear, number)
        end: Callable[[], None] = functools.partial(self._hear_end, number)
        self._selector.register(rank.child.heartbeat, selectors.EVENT_READ, hear)
        self._selector.register(rank.child.pidfd, selectors.EVENT_READ, end)

    def _hear(self, number: int) -> None:
        rank = self._ranks.get(number)
        if rank is None:
            return
        self._pass_on(rank)
        if not rank.child.heartbeat_open:  # its death comes through the pidfd
            self._selector.unregister(rank.child.heartbeat)

    def _pass_on(self, rank: _Rank) -> None:
        lines = rank.child.read_heartbeats()
        words = [line["standby"] for line in lines if "standby" in line]
        if "taken" in words and rank.answer_until_t is not None:
            self._begin(rank)
            self._let_go_of_listener()
        lines = [line for line in lines if "standby" not in line]
        if lines:
            self._tell(rank.order.rank, "lines", lines=lines)

    def _hear_end(self, number: int) -> None:
        rank = self._ranks.pop(number, None)
        if rank is None:
            return
        self._pass_on(rank)
        registered = self._selector.get_map()
        for descriptor in (rank.child.heartbeat, rank.child.pidfd):
            if descriptor in registered:
                self._selector.unregister(descriptor)
        code = rank.child.reap()
        passing("agent.heard_exit")
        if rank.output:
            rank.output.close()
        if rank.answer_until_t is not None and not rank.killed:
            message = f"the standby of rank {number} did not become a rank (exit code {code}); a new process does"
            self._tell(-1, "note", message=message)
            self._spawn(rank.order)
            if self._word is not None:
                self.say(self._word)
            self._let_go_of_listener()
        else:
            self._tell(number, "exit", code=code, tail=tail_of(rank.order.log))

    def _let_go_of_listener(self) -> None:
        """Closes the listening socket once rank 0 has it: a port that two processes hold outlives the rank."""
        main = self._ranks.get(0)
        if self._listener and (main is None or main.answer_until_t is None):
            self._listener.close()
            self._listener = None
