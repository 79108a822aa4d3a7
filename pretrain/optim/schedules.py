"""Learning rate as a pure function of the optimizer step. PURE: no torch.

Takes (step, peak, schedule) -> learning rate. `step` counts from 0 and is the index of the step about
to be taken: the warm-up ends with the peak at step warmup_steps - 1, the decay with the final
value at step total_steps - 1. Later steps keep that value.
Source: cosine, Loshchilov and Hutter 2017; wsd, Hu et al. 2024 (linear decay); inverse_sqrt, Vaswani
et al. 2017 section 5.3 (their rate, scaled to the peak).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pretrain.config.schema import ScheduleConfig


def learning_rate_at(step: int, peak: float, schedule: ScheduleConfig) -> float:
    """The learning rate of optimizer step `step` (0-based)."""
    done = step + 1
    if done <= schedule.warmup_steps:
        return peak * done / schedule.warmup_steps
    match schedule.kind:
        case "constant":
            return peak
        case "inverse_sqrt":
            return peak * math.sqrt(schedule.warmup_steps / done)
        case "cosine":
            progress = _progress(done, schedule.warmup_steps, schedule.total_steps)
            share = 0.5 * (1.0 + math.cos(math.pi * progress))
        case "wsd":
            share = 1.0 - _progress(done, schedule.total_steps - schedule.decay_steps, schedule.total_steps)
    return peak * (schedule.final_fraction + (1.0 - schedule.final_fraction) * share)


def _progress(done: int, start: int, end: int) -> float:
    """How far `done` is between start and end, clamped to [0, 1]; an empty range is not begun."""
    if end <= start:
        return 0.0
    return min(max((done - start) / (end - start), 0.0), 1.0)
