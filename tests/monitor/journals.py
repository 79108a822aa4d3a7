"""Journals and records written by hand, so that every second of them is known."""

from __future__ import annotations

from typing import Any

from pretrain.rundir import Event


class Journal:
    """Events at seconds after 1000, numbered as a writer would."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.lease = 1

    def at(self, t: float, kind: str, **fields: Any) -> Journal:
        self.events.append(Event(kind, 1000.0 + t, self.lease, len(self.events) + 1, fields))
        return self


def step(t: float, number: int, step_s: float, *, stall_s: float = 0.0, wait_s: float = 0.0) -> dict[str, Any]:
    return {
        "t": 1000.0 + t,
        "step": number,
        "loss": 2.0,
        "step_s": step_s,
        "save_stall_s": stall_s,
        "data_wait_s": wait_s,
        "tokens_per_second": 100.0,
    }


def validation(t: float, number: int, seconds: float) -> dict[str, Any]:
    return {"t": 1000.0 + t, "step": number, "validation": {"text": {"loss": 2.5}}, "validation_s": seconds}
