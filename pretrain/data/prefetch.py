"""One thread that reads the coming steps while the current one trains.

Takes a pure function (step, state) -> value and the function that gives the next state -> gives `read`.

Invariants: reading ahead never changes what is delivered: a value belongs to its exact (step, state),
an error to the read of that step only; a read of anything else drops what was ahead. `close` ends the
thread. No DataLoader worker processes: their queues limit at 8-10 M tokens/s, and they outlive crashes.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from pretrain.data.state import DataState
from pretrain.errors import StoreError

Value = TypeVar("Value")
_Key = tuple[int, DataState]
_JOIN_S = 5.0  # a thread stuck in the file system is left to die with the process


class Prefetcher(Generic[Value]):
    """See the module.

    Args:
        compute: reads one step; called by the thread only, one call at a time.
        following: the state after a step.
        depth: steps that are read ahead.
        most_at_once: steps after which a waiting reader is woken; it grows to that from one while the reader waits
            for every step, because a change of threads takes as long as packing a step of short rows.
        timeout_s: longest wait of `read`.
        fetching: names what is being read, for the message of a timeout.
    """

    def __init__(
        self,
        compute: Callable[[int, DataState], Value],
        following: Callable[[DataState], DataState],
        *,
        depth: int,
        most_at_once: int = 1,
        timeout_s: float,
        fetching: Callable[[], str],
    ) -> None:
        self._compute, self._following, self._fetching = compute, following, fetching
        self._depth, self._most_at_once, self._timeout_s = depth, most_at_once, timeout_s
        self._at_once, self._unannounced = 1, 0
        self._changed = threading.Condition()
        self._wanted: OrderedDict[_Key, None] = OrderedDict()  # in order of need, the current step first
        self._done: dict[_Key, Value | Exception] = {}
        self._closed = False
        self._thread: threading.Thread | None = None

    def read(self, step: int, state: DataState) -> Value:
        """The value of (step, state), waited for if need be; then the thread goes on with the steps after it.

        Raises:
            StoreError: it did not come within the timeout.
            Exception: whatever `compute` raised for this step.
        """
        key = (step, state)
        with self._changed:
            if self._closed:
                raise RuntimeError("the loader is closed")
            self._plan(key)
            deadline = time.monotonic() + self._timeout_s
            while key not in self._done:
                if not self._changed.wait(max(deadline - time.monotonic(), 0)) and key not in self._done:
                    what = self._fetching() or "no file (the rows were being packed)"
                    raise StoreError(
                        f"the rows of step {step} did not come within health.data_timeout_s={self._timeout_s:g}. "
                        f"Being read: {what}. Look at that storage, or raise health.data_timeout_s."
                    )
                if self._closed:
                    raise RuntimeError("the loader was closed during a read")
            value = self._done[key]
        if isinstance(value, Exception):
            raise value
        return value

    def close(self) -> None:
        """Ends the thread; a second call does nothing."""
        with self._changed:
            self._closed = True
            self._wanted.clear()
            self._done.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _plan(self, key: _Key) -> None:
        """Makes `key` and the steps after it what is wanted; drops everything else. Lock held."""
        if key in self._wanted:
            while (first := next(iter(self._wanted))) != key:
                del self._wanted[first]
                self._done.pop(first, None)
        else:
            self._wanted, self._done, self._at_once = OrderedDict([(key, None)]), {}, 1
        step, state = next(reversed(self._wanted))
        while len(self._wanted) <= self._depth:
            try:
                step, state = step + 1, self._following(state)
            except Exception:  # belongs to the caller's own step from there, not to this read
                break
            self._wanted[(step, state)] = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pretrain-data", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                key = self._next()
                while key is None and not self._closed:
                    self._changed.wait()
                    key = self._next()
                if self._closed or key is None:
                    return
            value: Value | Exception
            try:
                value = self._compute(*key)
            except Exception as error:  # handed to whoever reads that step
                value = error
            with self._changed:
                if key in self._wanted and not self._closed:
                    self._done[key] = value
                self._unannounced += 1
                if self._unannounced >= self._at_once or self._next() is None or isinstance(value, Exception):
                    self._at_once, self._unannounced = min(2 * self._at_once, self._most_at_once), 0
                    self._changed.notify_all()

    def _next(self) -> _Key | None:
        return next((key for key in self._wanted if key not in self._done), None)
