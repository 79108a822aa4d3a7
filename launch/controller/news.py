"""What happened to a crew since the controller last looked. Own design."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from launch.controller.offers import Seat
from launch.controller.state import Beat, RankExit, RankStack


@dataclass(slots=True)
class News:
    """What happened since the last look."""

    placed: tuple[Seat, ...] | None = None
    place_failed: str | None = None
    start_failed: str | None = None
    exits: list[RankExit] = field(default_factory=list)
    beats: list[Beat] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)
    processes: dict[int, dict[str, Any]] = field(default_factory=dict)  # rank -> identity, as spawned
    events: list[tuple[int, dict[str, Any]]] = field(default_factory=list)  # rank, event of its heartbeat pipe
    standbys: int | None = None  # slots whose standbys are ready
    standbys_ready: int | None = None  # all that were asked for are ready now; how many
    stacks: list[RankStack] = field(default_factory=list)
    evaluator_code: int | None = None  # the process that measures checkpoints ended; 0 also where its slot was needed
    unheard: frozenset[int] = frozenset()  # ranks whose agent says nothing just now
    is_part: bool = False  # more waits: who seems silent may only not have been read yet
    notes: list[str] = field(default_factory=list)  # what agents have to say to people


def read_lines(rank: int, lines: list[dict[str, Any]], news: News) -> None:
    """Takes what a rank said over its heartbeat pipe: events, and beats."""
    for line in lines:
        if "event" in line:
            news.events.append((rank, line))
        elif isinstance(line.get("phase"), str) and isinstance(line.get("step"), int):
            t, own_s = (line.get(name) if isinstance(line.get(name), float) else None for name in ("t", "own_s"))
            news.beats.append(Beat(rank, line["phase"], line["step"], int(line.get("collective", 0)), t, own_s))
