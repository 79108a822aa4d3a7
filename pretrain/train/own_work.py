"""A rank's own work in a step: waiting for its data and the forward passes, without waits for other ranks.

What makes a straggler is only seen there: the steps of all ranks last equally long, because they wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class OwnWork:
    """Sums seconds between two looks.

    Args:
        forward_s: seconds of all forward passes so far.
    """

    def __init__(self, forward_s: Callable[[], float]) -> None:
        self._forward_s = forward_s
        self._waited_s = 0.0
        self._seen: float | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The rank waits for its own data."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - started

    @property
    def waited_s(self) -> float:
        """Seconds of waiting for data so far."""
        return self._waited_s

    def take(self) -> float | None:
        """Seconds since the last call; None the first time."""
        total = self._waited_s + self._forward_s()
        since = None if self._seen is None else total - self._seen
        self._seen = total
        return since
