"""Which nodes have slots to offer: Ray's table, reconciled with what the controller saw itself.

Takes a `Nodes`, asked once a second from a thread of its own → offers by node. Ray needs 13 s to see that a node
is dead (measured), so a node whose agent was lost offers nothing until Ray has dropped it, or until it has
answered: at once where its raylet takes a connection though only the agent's connection had closed (the agent
alone was killed), after Ray has had its time where the agent was silent. Own design (DESIGN section 7).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from launch.controller.offers import Offer

LOOK_EVERY_S = 0.5
SILENT_NODE_REST_S = 20.0  # Ray declares a silent node dead after 13 s (measured)
CLOSED_NODE_REST_S = 0.5  # the processes of a node that dies close their connections at different moments
PROBE_WITHIN_S = 1.0
PROBE_AGAIN_S = 2.0
STALE_AFTER_S = 15.0  # a table that could not be read for so long is not known any more: a call to a dead Ray may block


class SlotsTakenError(Exception):
    """The slots that were asked for are not to be had now; ask again.

    Attributes:
        nodes: where they were not to be had: taken meanwhile, or dead and still in Ray's table.
    """

    def __init__(self, message: str, nodes: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.nodes = tuple(nodes)


class Nodes(Protocol):
    """Where slots come from. Every method may block; none is called on the controller's thread."""

    def offers(self) -> dict[str, Offer]:
        """Slots that could be taken now, by node; also nodes without any, as long as they are there."""

    def door(self, node: str) -> tuple[str, int] | None:
        """Address where the node takes connections as long as it lives, None if there is no such thing."""

    def launch(self, slots: Mapping[str, int], controller: tuple[str, int], secret: str) -> None:
        """Takes slots and starts an agent on each node. Raises SlotsTakenError when they are gone."""

    def release(self, node: str) -> None:
        """Gives the slots of a node back and ends its agent."""


@dataclass(frozen=True, slots=True)
class _Rest:
    since_t: float
    closed: bool


@dataclass(slots=True)
class _Probe:
    since_t: float
    answered: bool | None = None


class SlotTable:
    """See the module. `rest`, `offers` and `leaving_s` are called by the controller's thread.

    Attributes:
        version: changes whenever `offers` or `leaving_s` may.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._offers: dict[str, Offer] | None = None
        self._read_t = 0.0
        self._version = 0
        self._resting: dict[str, _Rest] = {}
        self._probes: dict[str, _Probe] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="slots", daemon=True)
        self._thread.start()

    def offers(self) -> dict[str, Offer] | None:
        """Slots by node, without nodes that rest; None while unknown."""
        with self._lock:
            if self._offers is None or time.monotonic() - self._read_t > STALE_AFTER_S:
                return None
            if not self._resting:
                return self._offers
            return {node: offer for node, offer in self._offers.items() if node not in self._resting}

    @property
    def version(self) -> tuple[int, bool]:
        return self._version, time.monotonic() - self._read_t > STALE_AFTER_S

    def leaving_s(self, node: str) -> float | None:
        """Seconds until a node goes, None if it stays or is not known."""
        offer = (self._offers or {}).get(node)
        return offer.leaving_s if offer else None

    def rest(self, node: str, *, closed: bool = False) -> None:
        """A node's agent was lost: it offers nothing until the node is known to live.

        Args:
            closed: its connection had closed, so its kernel lives; otherwise it was silent.
        """
        with self._lock:
            self._resting[node] = _Rest(time.monotonic(), closed)
            self._version += 1
        self._wake.set()

    def probe(self, node: str) -> bool | None:
        """Whether a node takes connections now; None while that is being tried, or where there is no door."""
        with self._lock:
            found = self._probes.get(node)
            if found is None or time.monotonic() - found.since_t > PROBE_AGAIN_S:
                found = self._probes[node] = _Probe(time.monotonic())
                threading.Thread(target=self._try, args=(node, found), name="probe", daemon=True).start()
            return found.answered

    def _try(self, node: str, probe: _Probe) -> None:
        try:
            door = self._nodes.door(node)
        except Exception:  # Ray raises many kinds
            door = None
        if door is not None:
            probe.answered = _takes_connections(door)

    def close(self) -> None:
        self._closed.set()
        self._wake.set()

    def _watch(self) -> None:
        while not self._closed.is_set():
            try:
                offers: dict[str, Offer] | None = self._nodes.offers()
            except Exception:  # Ray's table cannot be read now: unknown, not none
                offers = None
            with self._lock:
                if offers != self._offers:
                    self._version += 1
                self._offers, self._read_t, resting = offers, time.monotonic(), dict(self._resting)
            for node, rest in resting.items():
                if self._is_over(node, rest, offers):
                    with self._lock:
                        if self._resting.get(node) is rest:
                            del self._resting[node]
                            self._version += 1
            self._wake.wait(LOOK_EVERY_S)
            self._wake.clear()

    def _is_over(self, node: str, rest: _Rest, offers: Mapping[str, Offer] | None) -> bool:
        """Whether Ray has dropped the node, or it is known to live."""
        rested_s = time.monotonic() - rest.since_t
        if offers is not None and node not in offers:
            return rested_s > SILENT_NODE_REST_S  # should it come back into the table, it is judged anew
        if rested_s < (CLOSED_NODE_REST_S if rest.closed else SILENT_NODE_REST_S):
            return False
        door = self._nodes.door(node)
        if door is None:
            return rested_s > SILENT_NODE_REST_S
        return _takes_connections(door)


def _takes_connections(door: tuple[str, int]) -> bool:
    with suppress(OSError), socket.create_connection(door, timeout=PROBE_WITHIN_S):
        return True
    return False
