"""Exactly one holder: races, kills, clocks that differ, take-overs, and who may still publish."""

from __future__ import annotations

import dataclasses
import errno
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pretrain.errors import ExitCode, FencedError, LeaseHeldError, RunError, StoreError
from pretrain.rundir import DamagedFileError, Lease, this_process
from pretrain.rundir.lease_file import lease_key, read_lease
from pretrain.store import Store, UnsupportedError, open_store
from tests.rundir.helpers import ELSEWHERE, FakeClock, flip_bits, gone_process, put_lease, start_holder


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "run")


# ---------------------------------------------------------------------------------------- two holders


def test_a_living_holder_is_named_and_the_second_is_turned_away(store: Store) -> None:
    with Lease.acquire(store, purpose="training"):
        with pytest.raises(LeaseHeldError) as caught:
            Lease.acquire(store, purpose="another")
        assert str(caught.value) == (
            f"{store.url} is held by pid {os.getpid()} on {this_process().host} (training, lease 1). "
            "Only one process may train a run. Wait for it, stop it with pretrain stop, "
            "or, if it is certainly gone, use pretrain resume RUN --takeover."
        )
        assert caught.value.exit_code == ExitCode.USER_ERROR
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_killed_holder_on_this_host_is_dead_at_once(store: Store) -> None:
    process, token = start_holder(store)
    with pytest.raises(LeaseHeldError, match=rf"is held by pid {process.pid} on "):
        Lease.acquire(store, purpose="another")
    process.kill()
    started = time.monotonic()
    lease = Lease.acquire(store, purpose="another")  # nobody has waited for the killed process yet
    assert time.monotonic() - started < 2
    assert (token.split(":")[0], lease.number) == ("1", 2)
    process.communicate(timeout=5)
    lease.release()


def test_a_holder_whose_pid_was_reused_is_dead(store: Store) -> None:
    earlier = dataclasses.replace(this_process(), start_time=this_process().start_time - 1)
    put_lease(store, earlier, time.time())
    assert Lease.acquire(store, purpose="another").number == 2


RACER = """
import sys
from pretrain.errors import LeaseHeldError
from pretrain.rundir import Lease
from pretrain.store import open_store
store = open_store(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
try:
    print(Lease.acquire(store, purpose="race").number, flush=True)
except LeaseHeldError:
    print("held", flush=True)
sys.stdin.readline()
"""


def test_of_several_processes_at_once_exactly_one_gets_the_lease(store: Store) -> None:
    put_lease(store, gone_process(), time.time(), number=6)
    command = [sys.executable, "-c", RACER, store.url]
    racers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]

    def hear() -> list[str]:
        return [racer.stdout.readline().strip() for racer in racers if racer.stdout]

    assert hear() == ["ready"] * 4
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    assert sorted(hear()) == ["7", "held", "held", "held"]
    for racer in racers:
        racer.communicate("end\n", timeout=10)


# -------------------------------------------------------------------------------------- another host


def test_a_holder_on_another_host_is_dead_after_30_s_without_renewal(store: Store) -> None:
    clock = FakeClock()
    put_lease(store, ELSEWHERE, renewed_at=clock.now() - 2)
    lease = Lease.acquire(store, purpose="another", clock=clock)
    assert lease.number == 2
    assert 27 < clock.slept <= 31


def test_a_holder_on_another_host_that_stopped_long_ago_is_only_watched_for_a_moment(store: Store) -> None:
    clock = FakeClock()
    put_lease(store, ELSEWHERE, renewed_at=clock.now() - 3600)
    assert Lease.acquire(store, purpose="another", clock=clock).number == 2
    assert 1 < clock.slept <= 6


@pytest.mark.parametrize("skew_s", [-3600, 0, 3600])
def test_a_holder_on_another_host_that_renews_is_alive_whatever_its_clock_says(store: Store, skew_s: float) -> None:
    clock = FakeClock(during_sleep=lambda: put_lease(store, ELSEWHERE, renewed_at=clock.now() + skew_s))
    put_lease(store, ELSEWHERE, renewed_at=clock.now() + skew_s)
    with pytest.raises(LeaseHeldError, match=r"is held by pid 4711 on node7 \(training, lease 1\)"):
        Lease.acquire(store, purpose="another", clock=clock)
    assert clock.slept <= 5


def test_a_dead_holder_with_a_clock_ahead_is_dead_after_30_s_too(store: Store) -> None:
    clock = FakeClock()
    put_lease(store, ELSEWHERE, renewed_at=clock.now() + 3600)
    assert Lease.acquire(store, purpose="another", clock=clock).number == 2
    assert 30 < clock.slept <= 32


def test_a_takeover_does_not_wait(store: Store) -> None:
    clock = FakeClock()
    put_lease(store, ELSEWHERE, renewed_at=clock.now())
    assert Lease.acquire(store, purpose="another", takeover=True, clock=clock).number == 2
    assert clock.slept == 0


# ------------------------------------------------------------------------------ release and numbering


def test_a_released_lease_can_be_taken_at_once_and_its_number_never_comes_again(store: Store) -> None:
    for number in (1, 2, 3):
        with Lease.acquire(store, purpose="training") as lease:
            lease.start_renewing()
            assert lease.number == number
        lease.release()
        with pytest.raises(FencedError, match="was released or removed"):
            lease.check()
    store.put("journal/000009/00000001.json", b"")
    store.delete_tree("lease")
    assert Lease.acquire(store, purpose="training").number == 10


def test_a_lease_is_renewed_every_second(store: Store) -> None:
    with Lease.acquire(store, purpose="training") as lease:
        first = read_lease(store, 1).renewed_at
        lease.start_renewing()
        deadline = time.monotonic() + 5
        while read_lease(store, 1).renewed_at == first and time.monotonic() < deadline:
            time.sleep(0.05)
        assert 0.9 < read_lease(store, 1).renewed_at - first < 3


def test_a_store_that_cannot_arbitrate_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="Put the run on a shared file system"):
        Lease.acquire(open_store("memory://lease-test"), purpose="training")


# ------------------------------------------------------------------------------------------- fencing


def test_a_holder_that_was_taken_over_may_not_publish_nor_renew(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretrain.rundir.lease.RENEW_EVERY_S", 0.05)
    old = Lease.acquire(store, purpose="training")
    old.check()
    new = Lease.acquire(store, purpose="another", takeover=True)
    with pytest.raises(FencedError) as caught:
        old.check()
    assert str(caught.value) == (
        f"{store.url} was taken over: lease 2 is newer than lease 1 of this process. "
        "Only the newest may publish. This process ends and writes nothing more."
    )
    assert caught.value.exit_code == ExitCode.FENCED
    before = store.get(lease_key(1))
    old.start_renewing()
    time.sleep(0.3)
    old.release()
    assert store.get(lease_key(1)) == before
    new.check()
    new.release()


def test_a_holder_whose_file_is_gone_may_not_publish(store: Store) -> None:
    lease = Lease.acquire(store, purpose="training")
    store.delete(lease_key(1))
    with pytest.raises(FencedError, match=r"lease 1 of .* was released or removed"):
        lease.check()


def test_ranks_borrow_the_lease_by_its_token(store: Store) -> None:
    lease = Lease.acquire(store, purpose="training")
    borrowed = Lease.borrow(store, lease.token)
    borrowed.check()
    assert (borrowed.number, borrowed.uuid, borrowed.token) == (lease.number, lease.uuid, lease.token)
    borrowed.release()  # not its to give
    borrowed.check()
    lease.release()
    with pytest.raises(FencedError, match="was released"):
        borrowed.check()
    with pytest.raises(FencedError, match="was released"):
        Lease.borrow(store, lease.token)


def test_a_token_that_does_not_fit_is_refused(store: Store) -> None:
    Lease.acquire(store, purpose="training")
    for token in ("", "1", "x:y", "1:"):
        with pytest.raises(RunError, match=r"is not a lease. It reads <number>:<uuid>"):
            Lease.borrow(store, token)
    with pytest.raises(FencedError, match=r"lease 1 of .* belongs to pid"):
        Lease.borrow(store, "1:somebody-else")
    with pytest.raises(FencedError, match=r"lease 7 of .* does not exist any more"):
        Lease.borrow(store, "7:x")


# ------------------------------------------------------------------------------------------- damage


def test_a_flipped_bit_in_a_lease_is_an_error_that_names_it_and_a_takeover_gets_by(store: Store) -> None:
    put_lease(store, ELSEWHERE, renewed_at=0.0)
    path = Path(store.url) / lease_key(1)
    content, texts = path.read_bytes(), set()
    for damaged in flip_bits(path, every=37):
        store.put(lease_key(1), damaged)
        with pytest.raises(DamagedFileError) as caught:
            Lease.acquire(store, purpose="another")
        texts.add(str(caught.value))
    assert texts == {
        f"{path} is damaged: {why}. What is read back must be what was written. Make sure that no process trains "
        "this run any more, then take it over with pretrain resume RUN --takeover."
        for why in ("it is not a record of JSON", "its content does not match its sha256")
    }
    assert path.read_bytes() != content
    assert Lease.acquire(store, purpose="another", takeover=True).number == 2


def test_a_full_disk_does_not_end_the_renewals_nor_the_holder(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretrain.rundir.lease.RENEW_EVERY_S", 0.05)
    with Lease.acquire(store, purpose="training") as lease:
        first = read_lease(store, 1).renewed_at

        def full(*args: object, **kwargs: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr("os.replace", full)
            lease.start_renewing()
            deadline = time.monotonic() + 5
            while lease.renewal_error is None and time.monotonic() < deadline:
                time.sleep(0.05)
            assert isinstance(lease.renewal_error, StoreError)
            lease.check()
        while read_lease(store, 1).renewed_at == first and time.monotonic() < deadline:
            time.sleep(0.05)
        assert read_lease(store, 1).renewed_at > first
