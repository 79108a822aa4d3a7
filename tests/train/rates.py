"""A prelude for rank processes that notes the learning rates which the optimizer itself stepped with."""

from __future__ import annotations

import json
import os
from typing import Any

from pretrain.engine.engine import Engine, StepOutcome


def install() -> None:
    """Appends the rates of all parameter groups to the file RATES after each optimizer step, on rank 0."""
    step = Engine.step

    def noted(self: Any, learning_rate: float) -> StepOutcome:
        outcome = step(self, learning_rate)
        if os.environ.get("RANK", "0") == "0":
            rates = [float(group["lr"]) for group in self.deepspeed_engine.basic_optimizer.param_groups]
            with open(os.environ["RATES"], "a") as file:
                file.write(json.dumps(rates) + "\n")
        return outcome

    Engine.step = noted  # type: ignore[method-assign]
