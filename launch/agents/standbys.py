"""Standbys of an agent: processes that have imported everything and wait to become a rank.

Takes what ranks of this run are started with → at most the wanted number of waiting processes, one of
which is taken when it fits. A standby is fixed at its spawn: command, environment and code on disk;
one that no longer fits is ended, never used. One that dies or hangs while waiting is replaced a few
times, then given up until the next order: ranks are spawned instead. Own design (DESIGN section 7).
"""

from __future__ import annotations

import functools
import hashlib
import selectors
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

import pretrain
from launch.agents.process import Child, RankOrder, Tell, tail_of_stream

READY_WITHIN_S = 300.0  # imports at low priority beside a busy run
TAKEN_WITHIN_S = 2.0  # a standby that does not answer an order for so long is stuck
MEMORY_BYTES = 400 * 2**20  # of one standby: 313 MB measured
MAX_FAILURES = 3  # standbys that die or hang before they are used, by order


@dataclass(frozen=True, slots=True)
class StandbyOrder:
    """What standbys are made of."""

    count: int
    command: Sequence[str]
    fixed: Mapping[str, str]


@dataclass(slots=True, eq=False)
class Standby:
    """One waiting process."""

    child: Child
    command: tuple[str, ...]
    fixed: dict[str, str]
    code: str  # version of the code on disk when it was spawned
    output: IO[bytes]  # what it prints before it is a rank
    spawned_t: float
    ready: bool = False

    def fits(self, order: RankOrder, code: str) -> bool:
        return self.command == tuple(order.command) and self.fixed == dict(order.fixed) and self.code == code


class Standbys:
    """Used by the agent's one thread.

    Args:
        inherited: environment that every process of the agent inherits.
        selector: calls what is registered as data when a descriptor is readable.
        tell: sends a message to the controller.
    """

    def __init__(self, inherited: Mapping[str, str], selector: selectors.BaseSelector, tell: Tell) -> None:
        self._inherited, self._selector, self._tell = inherited, selector, tell
        self._order: StandbyOrder | None = None
        self._failures = 0
        self._waiting: list[Standby] = []

    def want(self, order: StandbyOrder) -> None:
        """Standbys are made from now on, if there is memory for them."""
        self._order, self._failures = order, 0
        missing = order.count - len(self._waiting)
        free = psutil.virtual_memory().available
        if missing > 0 and free < 2 * missing * MEMORY_BYTES:  # the other half stays the run's
            wanted = 2 * missing * MEMORY_BYTES
            self._give_up(f"{missing} want {wanted / 2**30:.1f} GB of free memory and {free / 2**30:.1f} GB are free")
        elif missing <= 0:
            self._count_ready()

    def rest(self) -> None:
        """No new standbys until the next order: an attempt starts and needs the machine for itself."""
        self._order = None

    def take(self, order: RankOrder) -> Standby | None:
        """A standby that fits, ready ones first. What does not fit is killed; its end is heard as usual."""
        if not self._waiting:
            return None
        code = code_version()
        for standby in sorted(self._waiting, key=lambda standby: not standby.ready):
            if standby.fits(order, code):
                self._waiting.remove(standby)
                self._unwatch(standby)
                return standby
            standby.child.kill()
        return None

    def check(self) -> None:
        """Spawns what is missing; kills those that do not get ready."""
        now = time.monotonic()
        for standby in self._waiting:
            if not standby.ready and now - standby.spawned_t > READY_WITHIN_S:
                standby.child.kill()
        while self._order and len(self._waiting) < self._order.count:
            try:
                self._spawn(self._order)
            except OSError as error:
                self._give_up(str(error))

    def close(self) -> None:
        """Ends all that wait."""
        self._order = None
        for standby in self._waiting:
            standby.child.kill()
        for standby in list(self._waiting):
            self._hear_end(standby)

    def _spawn(self, order: StandbyOrder) -> None:
        code = code_version()  # before the imports: what changes meanwhile makes it unfit
        output = tempfile.TemporaryFile(prefix="pretrain-standby-")  # noqa: SIM115 - lives as long as the standby
        try:
            child = Child([*order.command, "--standby"], {**self._inherited, **order.fixed}, output)
        except OSError:
            output.close()
            raise
        standby = Standby(child, tuple(order.command), dict(order.fixed), code, output, time.monotonic())
        self._waiting.append(standby)
        self._selector.register(child.heartbeat, selectors.EVENT_READ, functools.partial(self._hear, standby))
        self._selector.register(child.pidfd, selectors.EVENT_READ, functools.partial(self._hear_end, standby))

    def _hear(self, standby: Standby) -> None:
        if standby not in self._waiting:
            return
        if any(line.get("standby") == "ready" for line in standby.child.read_heartbeats()):
            standby.ready = True
            self._count_ready()
        if not standby.child.heartbeat_open:
            self._selector.unregister(standby.child.heartbeat)

    def _hear_end(self, standby: Standby) -> None:
        if standby not in self._waiting:
            return
        self._waiting.remove(standby)
        self._unwatch(standby)
        code, tail = standby.child.reap(), tail_of_stream(standby.output)
        standby.output.close()
        self._failures += 1
        if self._order and self._failures >= MAX_FAILURES:
            for other in self._waiting:
                if not other.ready:  # likely to fail as these did, and then it would be a rank's fault
                    other.child.kill()
            self._give_up(f"{self._failures} ended while they waited, the last with code {code}. Last words:\n{tail}")

    def _unwatch(self, standby: Standby) -> None:
        registered = self._selector.get_map()
        for descriptor in (standby.child.heartbeat, standby.child.pidfd):
            if descriptor in registered:
                self._selector.unregister(descriptor)

    def _give_up(self, why: str) -> None:
        self._order = None
        self._tell(-1, "note", message=f"no standbys on {socket.gethostname()} until the next restart: {why}")

    def _count_ready(self) -> None:
        self._tell(-1, "standbys", ready=sum(standby.ready for standby in self._waiting))


def hand_over(standby: Standby, order: RankOrder, master: int | None) -> None:
    """Makes a standby the rank of `order`; it answers `taken` on its heartbeat pipe.

    Args:
        master: descriptor of the listening socket of MASTER_PORT for rank 0.

    Raises:
        OSError: it is gone or does not read, or the log cannot be opened.
    """
    with order.open_log() as output:
        message: dict[str, Any] = {"arguments": list(order.arguments), "environment": dict(order.own)}
        standby.child.hand_over(message, [output.fileno(), *([] if master is None else [master])])


def code_version() -> str:
    """Digest of the product's source files by name, size and time: differs when what is imported would."""
    package = Path(pretrain.__file__).parent
    seen = []
    for path in sorted(package.rglob("*.py")):
        status = path.stat()
        seen.append(f"{path.relative_to(package)} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()
