"""Who may publish for a run: a lease with a number that only grows, so that the newest always wins.

`lease/<number>.json` holds the holder's identity and is renewed every second. A new holder creates
the next number (exactly one can); everyone who publishes looks right before whether a higher number
exists. A holder is dead when its process is gone (same boot and pid namespace) or, elsewhere, after
30 s without renewal: by its own clock's stamp, confirmed by watching, since clocks differ. Released
leases stay as files: numbers are never given twice. Source: own; fencing tokens as in Kleppmann 2016.
"""

from __future__ import annotations

import threading
import time
import uuid

from pretrain.errors import FencedError, LeaseHeldError, RunError, StoreError
from pretrain.faults import passing
from pretrain.rundir.lease_file import (
    DEAD_AFTER_S,
    LeaseRecord,
    lease_key,
    lease_numbers,
    newest_number,
    read_lease,
)
from pretrain.rundir.process import is_alive, is_ending, this_process
from pretrain.rundir.records import encode_record
from pretrain.store import NotFoundError, Store

RENEW_EVERY_S = 1.0
# A living holder shows itself within this time by a renewal, however wrong the clocks are.
WATCH_S = 5.0
# A process that was just killed on this host still shows for a moment: `kill -9` and `resume` in one line must work.
KILLED_S = 1.0


class Clock:
    """The time, so that tests need not wait."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Lease:
    """The right to publish for a run, or (borrowed) the means to see whether it still holds."""

    def __init__(self, store: Store, record: LeaseRecord, *, owned: bool, clock: Clock) -> None:
        self.number = record.number
        self.uuid = record.uuid
        self._store = store
        self._record = record
        self._owned = owned
        self._clock = clock
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.renewal_error: StoreError | None = None

    @classmethod
    def acquire(cls, store: Store, *, purpose: str, takeover: bool = False, clock: Clock | None = None) -> Lease:
        """Takes the run, waiting up to 30 s where only time can tell whether the last holder is dead.

        Args:
            store: of the run's directory.
            purpose: what the holder does, for the message that others get.
            takeover: do not ask whether the last holder lives; it is fenced off.
            clock: the time.

        Raises:
            LeaseHeldError: a living process holds the run.
            DamagedFileError: the last holder's file is damaged, so that nobody knows.
            StoreError: the storage failed or cannot arbitrate.
        """
        clock = clock or Clock()
        while True:
            number = newest_number(store)
            if number and not takeover:
                _wait_for_death(store, number, clock)
            record = LeaseRecord(number + 1, uuid.uuid4().hex, this_process(), purpose, clock.now(), released=False)
            if store.put_if_absent(lease_key(number + 1), encode_record(record.to_json())):
                return cls(store, record, owned=True, clock=clock)

    @classmethod
    def borrow(cls, store: Store, token: str) -> Lease:
        """The lease of the process that started this one, by its token; it can be checked, not renewed or released.

        Raises:
            RunError: the token is malformed.
            FencedError: that lease is not the run's current one any more.
        """
        number, colon, identifier = token.partition(":")
        if not colon or not number.isdigit() or not identifier:
            raise RunError(
                f"lease={token!r} is not a lease. It reads <number>:<uuid>. Take it from the process that holds it."
            )
        try:
            record = read_lease(store, int(number))
        except NotFoundError:
            raise FencedError(f"lease {number} of {store.url} does not exist any more. This process ends.") from None
        if record.uuid != identifier:
            raise FencedError(f"lease {number} of {store.url} belongs to {record.holder}. This process ends.")
        lease = cls(store, record, owned=False, clock=Clock())
        lease.check()
        return lease

    @property
    def token(self) -> str:
        """`<number>:<uuid>`, for `borrow`."""
        return f"{self.number}:{self.uuid}"

    def check(self) -> None:
        """Call right before anything is published or deleted.

        Raises:
            FencedError: a newer lease exists, or this one was released or removed.
        """
        numbers = lease_numbers(self._store)
        newest = max(numbers, default=0)
        if newest > self.number:
            raise FencedError(
                f"{self._store.url} was taken over: lease {newest} is newer than lease {self.number} of this process. "
                "Only the newest may publish. This process ends and writes nothing more."
            )
        gone = self.number not in numbers
        if not gone and not self._owned:
            record = read_lease(self._store, self.number)
            gone = record.uuid != self.uuid or record.released
        if gone or self._stop.is_set():
            raise FencedError(
                f"lease {self.number} of {self._store.url} was released or removed. "
                "Only its holder may publish. This process ends and writes nothing more."
            )

    def start_renewing(self) -> None:
        """Renews every second from a daemon thread, until `release`, or until a newer lease is seen."""
        if self._thread is None and self._owned:
            self._thread = threading.Thread(target=self._renew, name="lease-renewal", daemon=True)
            self._thread.start()

    def release(self) -> None:
        """Gives the run free at once. Nothing happens if it was lost or released already."""
        if not self._owned or self._stop.is_set():
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if max(lease_numbers(self._store), default=0) == self.number:
            self._write(released=True)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def _renew(self) -> None:
        while not self._stop.wait(RENEW_EVERY_S):
            try:
                self.check()
                passing("lease.renew")
                self._write(released=False)
                self.renewal_error = None
            except FencedError:
                return
            except StoreError as error:  # a full disk: on this host the process itself proves that it lives
                self.renewal_error = error

    def _write(self, *, released: bool) -> None:
        old = self._record
        self._record = LeaseRecord(old.number, old.uuid, old.holder, old.purpose, self._clock.now(), released)
        self._store.put(lease_key(self.number), encode_record(self._record.to_json()))


def _wait_for_death(store: Store, number: int, clock: Clock) -> None:
    """Returns when the holder of a lease is certainly dead. Raises LeaseHeldError when it lives."""
    started, first = clock.monotonic(), None
    while True:
        try:
            record = read_lease(store, number)
        except NotFoundError:
            return
        alive = is_alive(record.holder)
        if record.released or alive is False:
            return
        first = first or record
        watched = clock.monotonic() - started
        if alive:
            if watched >= (DEAD_AFTER_S if is_ending(record.holder) else KILLED_S):
                raise _held(store, record)
            clock.sleep(0.02)
            continue
        if record.renewed_at != first.renewed_at:
            raise _held(store, record)
        if watched >= WATCH_S and (watched > DEAD_AFTER_S or clock.now() - record.renewed_at > DEAD_AFTER_S):
            return
        clock.sleep(0.5)


def _held(store: Store, record: LeaseRecord) -> LeaseHeldError:
    return LeaseHeldError(
        f"{store.url} is held by {record.holder} ({record.purpose}, lease {record.number}). "
        "Only one process may train a run. Wait for it, stop it with pretrain stop, "
        "or, if it is certainly gone, use pretrain resume RUN --takeover."
    )
