"""Tells the rest of the world what happened in this attempt: to the agent, or into the journal itself.

Under a controller the events go through the heartbeat pipe and the controller writes the journal;
without one, rank 0 holds the lease and writes it.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from pretrain.rundir import JournalWriter
from pretrain.train.watch import Heartbeat


@runtime_checkable
class Reporter(Protocol):
    """Takes events by their journal kind."""

    def event(self, kind: str, **fields: Any) -> None: ...


class PipeReporter:
    """Under an agent: events travel with the heartbeats of rank 0."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat

    def event(self, kind: str, **fields: Any) -> None:
        self._heartbeat.event(kind, **fields)


class JournalReporter:
    """Without a controller: events go into the journal, under this process's own lease."""

    def __init__(self, journal: JournalWriter) -> None:
        self._journal = journal

    def event(self, kind: str, **fields: Any) -> None:
        self._journal.append(kind, **fields)


class SilentReporter:
    """Ranks other than 0 have nothing to add."""

    def event(self, kind: str, **fields: Any) -> None:
        pass
