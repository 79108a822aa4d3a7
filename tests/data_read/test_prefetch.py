"""The thread that reads ahead: what it delivers, what it drops, how it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from pretrain.data.prefetch import Prefetcher
from pretrain.data.state import DataState, Segment
from pretrain.errors import DataError, StoreError

START = DataState(0, 1, (Segment(0, 1, 1, 1, 1, 1, 1, None, ()),))


def following(state: DataState) -> DataState:
    return state.advance(1)


def prefetcher(compute: Callable[[int, DataState], str], *, depth: int = 3, timeout_s: float = 5.0) -> Prefetcher[str]:
    return Prefetcher(
        lambda keys: [compute(*key) for key in keys],
        following,
        depth=depth,
        timeout_s=timeout_s,
        fetching=lambda: "the-file",
    )


def settle(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_the_coming_steps_are_read_ahead_in_order_and_no_further() -> None:
    read: list[int] = []

    def compute(step: int, state: DataState) -> str:
        read.append(step)
        return f"{step}@{state.next_row}"

    ahead = prefetcher(compute)
    assert ahead.read(0, START) == "0@0"
    settle(lambda: len(read) == 4)
    time.sleep(0.02)
    assert read == [0, 1, 2, 3]
    assert ahead.read(1, following(START)) == "1@1"
    settle(lambda: len(read) == 5)
    assert read == [0, 1, 2, 3, 4]
    ahead.close()


def test_another_state_for_the_same_step_drops_what_was_ahead() -> None:
    ahead = prefetcher(lambda step, state: f"{step}@{state.next_row}")
    assert ahead.read(0, START) == "0@0"
    assert ahead.read(1, START.advance(7)) == "1@7"
    assert ahead.read(2, START.advance(8)) == "2@8"
    assert ahead.read(0, START) == "0@0"
    ahead.close()


def test_an_error_of_a_coming_step_is_raised_by_that_step_only() -> None:
    def compute(step: int, state: DataState) -> str:
        if step == 2:
            raise DataError("step two is bad")
        return str(step)

    ahead = prefetcher(compute)
    state = START
    for step in (0, 1):
        assert ahead.read(step, state) == str(step)
        state = following(state)
    with pytest.raises(DataError, match="step two is bad"):
        ahead.read(2, state)
    assert ahead.read(3, following(state)) == "3"
    ahead.close()


def test_a_state_without_a_successor_is_read_itself() -> None:
    state = START.with_skip(5, 9)
    ahead = Prefetcher(
        lambda keys: [str(step) for step, _ in keys],
        lambda s: s.advance(3),
        depth=4,
        timeout_s=5.0,
        fetching=lambda: "",
    )
    assert ahead.read(0, state) == "0"
    assert ahead.read(1, state.advance(3)) == "1"
    ahead.close()


def test_a_slow_read_is_an_error_that_names_the_file_and_close_does_not_wait_for_it() -> None:
    gate = threading.Event()
    ahead = prefetcher(lambda step, state: str(gate.wait(20)), timeout_s=0.05)
    with pytest.raises(StoreError, match=r"step 0 did not come within health\.data_timeout_s=0\.05\. .*the-file"):
        ahead.read(0, START)
    gate.set()
    begun = time.monotonic()
    ahead.close()
    ahead.close()
    assert time.monotonic() - begun < 2
    assert not [t for t in threading.enumerate() if t.name == "pretrain-data"]
    with pytest.raises(RuntimeError, match="closed"):
        ahead.read(0, START)


def test_who_waits_for_rows_says_so_until_they_come() -> None:
    gate, signs = threading.Event(), list[float]()

    def waiting() -> None:
        signs.append(time.monotonic())
        if len(signs) == 3:
            gate.set()

    ahead = prefetcher(lambda step, state: str(gate.wait(20)))
    begun = time.monotonic()
    assert ahead.read(0, START, waiting) == "True"
    assert len(signs) >= 3
    assert signs[0] - begun < 2  # the longest silence that three short steps and their slack allow
    ahead.close()


def test_no_thread_exists_before_the_first_read() -> None:
    ahead = prefetcher(lambda step, state: "")
    assert not [t for t in threading.enumerate() if t.name == "pretrain-data"]
    ahead.close()
