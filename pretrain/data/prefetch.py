"""One thread that reads the coming steps while the current one trains.

Takes a pure function of (step, state)s -> their values and the function that gives the next state -> gives `read`.

Invariants: reading ahead never changes what is delivered: a value belongs to its exact (step, state),
an error to the read of that step only; a read of anything else drops what was ahead. `close` ends the
thread. No DataLoader worker processes: their queues limit at 8-10 M tokens/s, and they outlive crashes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar, cast

from pretrain.data.state import DataState
from pretrain.errors import StoreError

Value = TypeVar("Value")
SIGN_OF_LIFE_S = 0.5  # a reader that waits for rows says so that often
_JOIN_S = 5.0  # a thread stuck in the file system is left to die with the process


@dataclass(slots=True, eq=False)
class _Entry:
    """A step that is or was wanted, and what came of it."""

    step: int
    state: DataState
    is_done: bool = False
    value: object = None
    error: Exception | None = None


def await_rows(future: Future[Value], timeout_s: float, what: str, waiting: Callable[[], None] | None = None) -> Value:
    """What another thread reads, with a sign of life of who waits for it.

    Args:
        what: the rows, for the message.
        waiting: called every `SIGN_OF_LIFE_S` meanwhile.

    Raises:
        StoreError: it did not come in time.
        Exception: whatever the reading raised.
    """
    deadline = time.monotonic() + timeout_s
    while not wait([future], min(SIGN_OF_LIFE_S, timeout_s)).done:
        if time.monotonic() >= deadline:
            raise StoreError(
                f"{what} did not come within health.data_timeout_s={timeout_s:g}. "
                "Look at their storage, or raise health.data_timeout_s."
            )
        if waiting is not None:
            waiting()
    return future.result()


class Prefetcher(Generic[Value]):
    """See the module.

    Args:
        compute: reads steps that follow each other; called by the thread only, one call at a time.
        following: the state after a step.
        depth: steps that are read ahead.
        most_at_once: steps that are computed together; it grows to that from one while they are read one after the
            other, because short steps take less time together, and a change of threads as much as one of them.
        timeout_s: longest wait of `read`.
        fetching: names what is being read, for the message of a timeout.
    """

    def __init__(
        self,
        compute: Callable[[list[tuple[int, DataState]]], list[Value]],
        following: Callable[[DataState], DataState],
        *,
        depth: int,
        most_at_once: int = 1,
        timeout_s: float,
        fetching: Callable[[], str],
    ) -> None:
        self._compute, self._following, self._fetching = compute, following, fetching
        self._depth, self._most_at_once, self._timeout_s = depth, most_at_once, timeout_s
        self._at_once = 1
        self.waited = 0  # reads that found their step not ready
        lock = threading.Lock()
        self._done, self._work = threading.Condition(lock), threading.Condition(lock)  # for the reader, for the thread
        self._planned: deque[_Entry] = deque()  # in order of need, the current step first
        self._num_done = 0  # those with a value, which come first
        self._closed = False
        self._thread: threading.Thread | None = None

    def read(self, step: int, state: DataState, waiting: Callable[[], None] | None = None) -> Value:
        """The value of (step, state), waited for if need be; then the thread goes on with the steps after it.

        Args:
            waiting: called every `SIGN_OF_LIFE_S`, at least, while the value is waited for.

        Raises:
            StoreError: it did not come within the timeout.
            Exception: whatever `compute` raised for this step.
        """
        with self._done:
            if self._closed:
                raise RuntimeError("the loader is closed")
            entry = self._entry(step, state)
            deadline = time.monotonic() + self._timeout_s
            self.waited += not entry.is_done
            while not entry.is_done:
                self._done.wait(max(min(deadline - time.monotonic(), SIGN_OF_LIFE_S), 0))
                if self._closed:
                    raise RuntimeError("the loader was closed during a read")
                if not entry.is_done and time.monotonic() >= deadline:
                    what = self._fetching() or "no file (the rows were being packed)"
                    raise StoreError(
                        f"the rows of step {step} did not come within health.data_timeout_s={self._timeout_s:g}. "
                        f"Being read: {what}. Look at that storage, or raise health.data_timeout_s."
                    )
                if waiting is not None:
                    waiting()
        if entry.error is not None:
            raise entry.error
        return cast(Value, entry.value)

    @property
    def num_ready(self) -> int:
        """Steps that lie ready, the one that was read last included."""
        with self._done:
            return self._num_done

    def close(self) -> None:
        """Ends the thread; a second call does nothing."""
        with self._done:
            self._closed = True
            self._planned.clear()
            self._done.notify_all()
            self._work.notify()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _entry(self, step: int, state: DataState) -> _Entry:
        """Makes a step the first of the plan, drops what came before it, and wakes the thread if there is enough to do,
        else it would wake for nothing at each of several short steps. Lock held."""
        planned = self._planned
        while planned and not (planned[0].step == step and planned[0].state == state):
            self._num_done -= planned.popleft().is_done
        if not planned:
            planned.append(_Entry(step, state))
            self._at_once = 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pretrain-data", daemon=True)
            self._thread.start()
        if not self._num_done or self._depth + 1 - self._num_done >= self._at_once:
            self._work.notify()
        return planned[0]

    def _run(self) -> None:
        while True:
            with self._work:
                entries = self._next()
                while not entries and not self._closed:
                    self._work.wait()
                    entries = self._next()
                if self._closed:
                    return
            values = self._values(entries)
            with self._done:
                for entry, value in zip(entries, values, strict=True):
                    entry.value, entry.error = (None, value) if isinstance(value, Exception) else (value, None)
                    entry.is_done = True
                self._num_done = sum(entry.is_done for entry in self._planned)  # some may have been dropped meanwhile
                self._at_once = min(2 * self._at_once, self._most_at_once)
                self._done.notify_all()

    def _values(self, entries: list[_Entry]) -> list[Value | Exception]:
        """The values of steps, or the error of each that has one."""
        try:
            return [*self._compute([(entry.step, entry.state) for entry in entries])]
        except Exception as error:  # handed to whoever reads that step
            if len(entries) == 1:
                return [error]
            return [value for entry in entries for value in self._values([entry])]

    def _next(self) -> list[_Entry]:
        """Plans ahead and gives the steps to compute now: as many as go together, fewer only if the reader waits or no
        more can be planned. Lock held; called by the thread only, because the reader has a step to train."""
        planned, done = self._planned, self._num_done
        while planned and len(planned) <= self._depth:
            try:
                planned.append(_Entry(planned[-1].step + 1, self._following(planned[-1].state)))
            except Exception:  # belongs to the caller's own step from there, not to this read
                break
        is_end = len(planned) <= self._depth
        if not done or is_end or len(planned) - done >= self._at_once:
            return list(islice(planned, done, done + self._at_once))
        return []
