"""Slots of nodes, as the controller counts them. PURE values. Own design (DESIGN section 7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Offer:
    """Slots of a node.

    Attributes:
        leaving_s: seconds until the node goes, 0 if it may go at once; None: it stays.
    """

    slots: int
    host: str
    leaving_s: float | None = None


@dataclass(frozen=True, slots=True)
class Slots:
    """Offers of many nodes, counted once: a look must not walk through thousands of nodes.

    Attributes:
        staying: host -> slots on its nodes that stay.
        total: all of those.
        leaving: nodes that go.
    """

    nodes: Mapping[str, Offer]
    staying: Mapping[str, int]
    total: int
    leaving: frozenset[str]

    @classmethod
    def of(cls, nodes: Mapping[str, Offer]) -> Slots:
        staying: dict[str, int] = {}
        for offer in nodes.values():
            if offer.leaving_s is None:
                staying[offer.host] = staying.get(offer.host, 0) + offer.slots
        leaving = frozenset(node for node, offer in nodes.items() if offer.leaving_s is not None)
        return cls(nodes, staying, sum(staying.values()), leaving)

    def without(self, hosts: frozenset[str]) -> int:
        """Slots on nodes that stay, on other hosts than these."""
        return self.total - sum(self.staying.get(host, 0) for host in hosts)


NO_SLOTS = Slots({}, {}, 0, frozenset())


@dataclass(frozen=True, slots=True)
class Seat:
    """A slot that was got for a rank."""

    node: str
    host: str
