"""How often to save: the interval that loses the least time to saves and to work that must be done again. PURE.

takes -> the cost of a save, the mean time between failures; gives -> seconds between saves. Source: Young 1974
(first order); Daly 2006, equation 37 (the one used here), for failures that come at random.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def best_interval_s(save_cost_s: float, failure_s: float) -> float:
    """Seconds of training between the end of a save and the begin of the next.

    Args:
        save_cost_s: seconds that a save keeps the loop from training; above 0.
        failure_s: mean time between failures of the whole run.
    """
    if save_cost_s >= 2 * failure_s:
        return failure_s
    x = save_cost_s / (2 * failure_s)
    return math.sqrt(2 * save_cost_s * failure_s) * (1 + math.sqrt(x) / 3 + x / 9) - save_cost_s


@dataclass(frozen=True, slots=True)
class FailureRate:
    """Failures that a run has had.

    Attributes:
        failures: their number.
        running_s: how long the run has trained in all.
    """

    failures: int = 0
    running_s: float = 0.0

    def mean_time_s(self, expected_s: float) -> float:
        """Mean time between failures: what was expected counts as one failure, and fades as the run measures."""
        return (self.running_s + expected_s) / (self.failures + 1)


def count_failures(events: list[tuple[str, float, dict[str, object]]], *, from_memory: bool) -> FailureRate:
    """Failures in a run's journal: (kind, wall clock, fields), oldest first.

    Args:
        from_memory: the run has a memory tier: only faults count after which it had to go back to a durable
            checkpoint, for the others cost no durable save anything.
    """
    failures, running_s = 0, 0.0
    started_t: float | None = None
    faulty = False
    for kind, t, fields in events:
        if kind == "attempt_started":
            started_t = t
        elif (
            kind in ("fault", "attempt_ended", "completed", "stopped", "interrupted", "failed")
            and started_t is not None
        ):
            running_s, started_t = running_s + max(0.0, t - started_t), None
        if kind == "fault":
            faulty = True
            failures += not from_memory
        elif kind == "restored":
            failures += from_memory and faulty and fields.get("tier") == "durable"
            faulty = False
    return FailureRate(failures, running_s)
