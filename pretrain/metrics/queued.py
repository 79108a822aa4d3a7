"""What every sink outside the run directory shares: a bounded queue, a thread, and an end within bounds.

Takes records from the loop -> hands them, numbered, to a tracker in a daemon thread of its own. A tracker that is
dead, slow or full costs the loop a look at a queue: what finds no room there is counted and told at the end. Whatever
a tracker raises ends in one warning. The JSON lines have every record, so nothing is lost that a later attempt or a
person cannot send again.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from pretrain.log import Log

QUEUE_RECORDS = 10_000
CLOSE_TIMEOUT_S = 20.0

Numbered = tuple[int, dict[str, Any]]
Tracker = Callable[[Iterator[Numbered]], None]
"""Takes (number within the attempt, record) until there are no more; runs in a thread of its own."""


class QueuedSink:
    """A `Sink` in front of a tracker.

    Args:
        name: of the tracker, for messages.
        tracker: what the thread does.
        capacity: records that may wait.
    """

    def __init__(self, name: str, tracker: Tracker, *, log: Log, capacity: int = QUEUE_RECORDS) -> None:
        self._name, self._tracker, self._log = name, tracker, log
        self._records: queue.Queue[Numbered | None] = queue.Queue(capacity)
        self._written = 0
        self._off = False
        self.missed = 0  # records that found no room, or came after the tracker had failed
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def write(self, record: dict[str, Any]) -> None:
        """Never waits."""
        number, self._written = self._written, self._written + 1
        if self._off:
            self.missed += 1
            return
        try:
            self._records.put_nowait((number, record))
        except queue.Full:
            self.missed += 1
            if self.missed == 1:
                self._log.warning(f"{self._name} does not keep up and misses records; the JSON lines have them all")

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Waits at most `timeout_s` seconds for what is queued. True when the thread has ended."""
        if not self._off:
            deadline = time.monotonic() + timeout_s
            with contextlib.suppress(queue.Full):  # then the thread is stuck, and the join below says so
                self._records.put(None, timeout=timeout_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        ended = not self._thread.is_alive()
        if not ended:
            self._log.warning(f"{self._name} does not end in time; its last records may be missing")
        elif self.missed and not self._off:
            self._log.warning(f"{self._name} misses records of this attempt", missed=self.missed, of=self._written)
        return ended

    def _work(self) -> None:
        """The thread: everything that a tracker raises ends here, in one warning."""
        try:
            self._tracker(iter(self._records.get, None))
        except BaseException as error:  # wandb also raises SystemExit and bare exceptions of its service
            self._off = True
            self._log.warning(
                f"{self._name} is off for the rest of this attempt: {first_line(error)}. "
                "Training and the JSON lines go on."
            )


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def flatten(record: dict[str, Any]) -> dict[str, Any]:
    """A record as flat keys (`validation/prose/loss`); lists, texts that are no numbers' and what is not finite go."""
    from pretrain.metrics.sinks import finite

    flat: dict[str, Any] = {}
    for name, value in finite(record).items():
        if isinstance(value, dict):
            flat |= {f"{name}/{key}": item for key, item in flatten(value).items()}
        elif isinstance(value, bool):
            flat[name] = int(value)
        elif value is not None and not isinstance(value, list):
            flat[name] = value
    return flat
