"""Ranges of files from a store that may be slow, fail, or stall, for one reader.

Takes (key, start, length) -> gives exactly those bytes. From a remote store every request runs in a
thread of its own: `start` sends it ahead of need, `result` waits for it, sends a second one after
max(1 s, 3 x p95 of the latest latencies) and takes whichever answers first; failures are asked again
with growing, jittered waits. Local stores are read in place, with the same retries.
Invariants: nothing but time depends on how the store behaves; the whole wait is bounded, and its
error names the object. The threads are daemons: a request that hangs for ever holds up no exit.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar

from pretrain.errors import StoreError
from pretrain.log import Log
from pretrain.store import NotFoundError, ReadsInto, Store

Answer = TypeVar("Answer")

_LOCAL_WAITS_S = (0.1, 0.4, 1.6)
_REMOTE_WAITS_S = (0.1, 0.4, 1.6, 5.0, 15.0, 30.0, 30.0)  # a server that is started again is waited for
_DEADLINE_S = 300.0  # below every collective timeout; health.data_timeout_s may be shorter
_HEDGE_AFTER_S = 1.0
_HEDGE_FACTOR = 3.0
_LATENCIES = 128
_REPORT_EVERY_S = 300.0
_JITTER = random.Random()  # own: the global generator belongs to whoever seeds it


@dataclass(slots=True)
class FetchCounts:
    """What reading a source took, since it was opened.

    Attributes:
        requests: ranges asked of the store, with retries and hedges.
        retries: requests after a failure.
        hedges: second requests for one that was slow; `hedges_won` of them answered first.
        bytes: delivered from the store.
        cache_hits: blocks from the disk cache.
        refetched: blocks with a wrong checksum that were fetched again.
        wait_s: time that readers waited.
    """

    requests: int = 0
    retries: int = 0
    hedges: int = 0
    hedges_won: int = 0
    bytes: int = 0
    cache_hits: int = 0
    refetched: int = 0
    wait_s: float = 0.0


class Request:
    """A range that was asked for; `Fetcher.result` takes it."""

    def __init__(self, key: str, start: int, length: int) -> None:
        self.key, self.start, self.length = key, start, length
        self.answers: SimpleQueue[tuple[bytes | Exception, float, bool]] = SimpleQueue()
        self.under_way = 0


class Fetcher:
    """See the module. `start` and `result` are for one thread at a time."""

    def __init__(self, store: Store, *, is_remote: bool, log: Log, deadline_s: float = _DEADLINE_S) -> None:
        self.store, self.is_remote, self._log, self._deadline_s = store, is_remote, log, deadline_s
        self._waits_s = _REMOTE_WAITS_S if is_remote else _LOCAL_WAITS_S
        self._into = store if isinstance(store, ReadsInto) and not is_remote else None
        self._latencies: deque[float] = deque(maxlen=_LATENCIES)
        self._reported = time.monotonic()
        self.counts = FetchCounts()

    @property
    def fills_buffers(self) -> bool:
        """Whether `get_range_into` can be used."""
        return self._into is not None

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """The bytes, asked for and waited for. Raises as `result`."""
        if self.is_remote:
            return self.result(self.start(key, start, length))

        def ask() -> bytes:
            self.counts.requests += 1
            return self.store.get_range(key, start, length)

        data = self.patiently(ask)
        self.counts.bytes += length
        return data

    def get_range_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        """The bytes, into these buffers one after the other; only where `fills_buffers`. Raises as `result`."""
        assert self._into is not None

        def ask(store: ReadsInto = self._into) -> None:
            self.counts.requests += 1
            store.get_range_into(key, start, buffers)

        self.patiently(ask)
        self.counts.bytes += sum(map(len, buffers))

    def start(self, key: str, start: int, length: int) -> Request:
        """Sends a request to a remote store and returns at once."""
        request = Request(key, start, length)
        self._send(request, is_hedge=False)
        return request

    def result(self, request: Request) -> bytes:
        """Waits for a request.

        Raises:
            NotFoundError: there is no such file.
            StoreError: every try failed, or the deadline passed.
        """
        began = time.monotonic()
        try:
            return self._result(request, began + self._deadline_s)
        finally:
            self.counts.wait_s += time.monotonic() - began
            if time.monotonic() - self._reported > _REPORT_EVERY_S:
                self._reported = time.monotonic()
                self._log.info(f"reading {self.store.url}", **asdict(self.counts))

    def patiently(self, ask: Callable[[], Answer]) -> Answer:
        """What `ask` gives, asked again where the store fails. Raises NotFoundError at once, StoreError at last."""
        for wait_s in self._waits_s:
            try:
                return ask()
            except NotFoundError:
                raise
            except StoreError as error:
                self._pause(error, wait_s)
        return ask()

    def _result(self, request: Request, deadline: float) -> bytes:
        waits = iter(self._waits_s)
        hedge_at = time.monotonic() + self._patience_s()
        while True:
            try:
                timeout = max(min(hedge_at, deadline) - time.monotonic(), 0)
                answer, latency, is_hedge = request.answers.get(timeout=timeout)
            except Empty:
                if time.monotonic() >= deadline:
                    raise StoreError(
                        f"{self.store.url}/{request.key} (bytes {request.start} to {request.start + request.length}) "
                        f"did not come within {self._deadline_s:g} s. Look at that storage."
                    ) from None
                self.counts.hedges += 1
                hedge_at = time.monotonic() + self._deadline_s / 4  # two that are both lost are not the end
                self._send(request, is_hedge=True)
                continue
            request.under_way -= 1
            if isinstance(answer, bytes):
                self._latencies.append(latency)
                self.counts.hedges_won += is_hedge
                self.counts.bytes += request.length
                return answer
            if isinstance(answer, NotFoundError) or not isinstance(answer, StoreError):
                raise answer
            if request.under_way:  # the other one may still come
                continue
            wait_s = next(waits, None)
            if wait_s is None:
                raise answer
            self._pause(answer, min(wait_s, max(deadline - time.monotonic(), 0)))
            self._send(request, is_hedge=False)
            hedge_at = time.monotonic() + self._patience_s()

    def _pause(self, error: StoreError, wait_s: float) -> None:
        self._log.warning("reading data failed, trying again", cause=error)
        self.counts.retries += 1
        time.sleep(wait_s * _JITTER.uniform(0.5, 1.0))

    def _patience_s(self) -> float:
        """How long one request may take before a second one is sent."""
        if not self._latencies:
            return _HEDGE_AFTER_S
        p95 = sorted(self._latencies)[int(0.95 * (len(self._latencies) - 1))]
        return max(_HEDGE_AFTER_S, _HEDGE_FACTOR * p95)

    def _send(self, request: Request, *, is_hedge: bool) -> None:
        self.counts.requests += 1
        request.under_way += 1

        def run() -> None:
            began = time.monotonic()
            answer: bytes | Exception
            try:
                answer = self.store.get_range(request.key, request.start, request.length)
            except Exception as error:  # handed to whoever waits
                answer = error
            request.answers.put((answer, time.monotonic() - began, is_hedge))

        threading.Thread(target=run, name="pretrain-fetch", daemon=True).start()
