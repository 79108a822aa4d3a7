"""How often this run should save, from what a save costs and how often it fails: told, and applied if asked.

takes -> the journal, stalls of saves; gives -> seconds between durable saves, and a line for people.
"""

from __future__ import annotations

import statistics
import time
from collections import deque

from pretrain.checkpoint.interval import FailureRate, best_interval_s
from pretrain.config.schema import CheckpointConfig

_REMEMBERED = 5  # saves that count
_CHANGED = 1.25  # told again when the advice moved by so much


class IntervalAdvisor:
    """See the module.

    Args:
        before: failures and running time of earlier attempts.
    """

    def __init__(self, config: CheckpointConfig, before: FailureRate) -> None:
        self._config, self._before = config, before
        self._began = time.monotonic()
        self._stalls_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._writes_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._told_s: float | None = None

    def note_save(self, stall_s: float, write_s: float) -> None:
        """A durable save that succeeded: what it cost the loop, and how long it took in the background."""
        self._stalls_s.append(stall_s)
        self._writes_s.append(write_s)

    @property
    def failure_s(self) -> float:
        """Mean time between failures so far."""
        rate = FailureRate(self._before.failures, self._before.running_s + time.monotonic() - self._began)
        return rate.mean_time_s(3600 * self._config.expected_failure_hours)

    @property
    def seconds(self) -> float | None:
        """Seconds between two saves; None before the first. Never shorter than a save takes to be durable."""
        if not self._stalls_s:
            return None
        cost_s = max(1e-3, statistics.median(self._stalls_s))
        return max(best_interval_s(cost_s, self.failure_s), statistics.median(self._writes_s))

    def advice(self, steps_per_s: float | None) -> str | None:
        """A line for people when there is something new to say."""
        seconds = self.seconds
        if seconds is None:
            return None
        if self._told_s is not None and self._told_s / _CHANGED < seconds < self._told_s * _CHANGED:
            return None
        self._told_s = seconds
        steps = f" (about {max(1, round(seconds * steps_per_s))} steps)" if steps_per_s else ""
        done = "applied" if self._config.every == "auto" else "checkpoint.every=auto applies it"
        return (
            f"a save costs {statistics.median(self._stalls_s):.3g} s and a failure is expected every "
            f"{self.failure_s / 3600:.3g} h: best is a save every {seconds:.3g} s{steps}; {done}"
        )
