"""The part of a run's state that is no tensor: equal on every rank, stored in the checkpoint's manifest."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pretrain.data.state import DataState
from pretrain.train.health import HealthState


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Progress of a run after `step` optimizer steps.

    Attributes:
        step: finished optimizer steps, skipped ones included.
        data: where the data stream goes on.
        tokens: target tokens trained so far.
        skipped_steps: steps whose update was skipped for a non-finite gradient.
        consecutive_skips: how many of the last steps in a row were skipped.
        health: what judging the next steps needs.
    """

    step: int
    data: DataState
    tokens: int = 0
    skipped_steps: int = 0
    consecutive_skips: int = 0
    health: HealthState = field(default_factory=HealthState)

    def after(self, data: DataState, *, target_tokens: int, applied: bool) -> TrainingState:
        """The state one optimizer step later."""
        return replace(
            self,
            step=self.step + 1,
            data=data,
            tokens=self.tokens + target_tokens,
            skipped_steps=self.skipped_steps + (not applied),
            consecutive_skips=0 if applied else self.consecutive_skips + 1,
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "data": self.data.to_json()}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> TrainingState:
        health = HealthState.from_json(body["health"]) if "health" in body else HealthState()
        return cls(**{**body, "data": DataState.from_json(body["data"]), "health": health})
