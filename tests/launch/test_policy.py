"""The policy on made-up observations: who is blamed, what is tried again, when a run ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.controller.offers import NO_SLOTS, Offer, Seat, Slots
from launch.controller.policy import decide
from launch.controller.state import (
    Action,
    AskRanks,
    Beat,
    Cause,
    Fault,
    Finish,
    KillRanks,
    Limits,
    Observation,
    Outcome,
    Phase,
    Place,
    RankExit,
    RecordEnd,
    RecordFault,
    RunState,
    StandBy,
    StartRanks,
    Stop,
    TakeStacks,
)

LIMITS = Limits(
    num_ranks=2,
    min_ranks=2,
    max_failures={Cause.APPLICATION: 3, Cause.NODE: 2, Cause.HANG: 1, Cause.PREEMPTION: 5},
    backoff_s=0.5,
    heartbeat_timeout_s=10.0,
    start_timeout_s=30.0,
)


def offers(*slots: int, start: int = 0, leaving: dict[int, float] | None = None) -> Slots:
    """A node per number of slots; `leaving`: seconds that a node still has, by its number."""
    numbers = range(start, start + len(slots))
    return Slots.of({f"node{i}": Offer(slots[i - start], f"host{i}", (leaving or {}).get(i)) for i in numbers})


def seats(*hosts: int) -> tuple[Seat, ...]:
    return tuple(Seat(f"node{host}", f"host{host}") for host in hosts)


class Play:
    """A run in the policy's eyes; time goes by `at`."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits, self.state, self.now = limits, RunState(), 0.0
        self.held = NO_SLOTS
        self.actions: list[Action] = []

    def see(self, *, after: float = 0.1, **seen: Any) -> list[Action]:
        self.now += after
        seen.setdefault("held", self.held)
        self.state, actions = decide(self.state, Observation(**seen), self.now, self.limits)
        self.actions += actions
        return actions

    def start(self, ranks: int = 2) -> Play:
        self.see(offers=offers(*[1] * ranks), after=LIMITS.placing_grace_s + 0.1)
        self.see(placed=seats(*range(ranks)))
        assert self.state.phase is Phase.RUNNING
        return self

    def train(self, *steps: int) -> Play:
        for step in steps:
            self.see(beats=tuple(Beat(rank, "step", step) for rank in self.state.ranks))
        return self

    def crash(self, rank: int = 1, code: int = -9, **more: Any) -> list[Action]:
        return self.see(exits=(RankExit(rank, code, "last words"),), **more)

    def bury(self) -> list[Action]:
        """The killed ranks' exits arrive."""
        left = [rank for rank, view in self.state.ranks.items() if not view.gone]
        return self.see(exits=tuple(RankExit(rank, -9) for rank in left))

    def restart(self) -> Play:
        self.bury()
        self.now = max(self.now, self.state.retry_t)
        return self.start()

    @property
    def outcome(self) -> Outcome | None:
        return next((action.outcome for action in self.actions if isinstance(action, Finish)), None)

    @property
    def faults(self) -> list[Fault]:
        return [action.fault for action in self.actions if isinstance(action, RecordFault)]


def kinds(actions: Sequence[Action]) -> list[type]:
    return [type(action) for action in actions]


def test_a_run_that_nobody_touches_is_placed_started_and_completed() -> None:
    play = Play()
    assert play.see(offers=offers(1, 1)) == [Place(2)]
    assert play.see() == []
    assert play.see(placed=seats(0, 1)) == [StartRanks(1, 2, "first start")]
    play.train(0, 1)
    assert play.see(exits=(RankExit(0, 0),)) == []
    ended = play.see(exits=(RankExit(1, 0),), committed_step=2)
    assert ended == [RecordEnd(1, "completed"), Finish(Outcome("completed", 0, 2))]


def test_a_killed_rank_is_blamed_by_name_host_and_signal_and_the_others_are_killed_first() -> None:
    play = Play().start().train(3, 4)
    actions = play.crash(rank=1, code=-9)
    assert kinds(actions) == [KillRanks, RecordFault]
    assert "rank 1 on host1 was ended by signal 9, likely out of memory" in play.faults[0].text
    assert "at step 4" in play.faults[0].text
    assert "last words" in play.faults[0].text


def test_standbys_are_asked_for_once_an_attempt_and_only_when_every_rank_trains() -> None:
    play = Play(replace(LIMITS, standbys=True)).start()
    play.held = offers(1, 1)
    play.train(5)  # the first step is not done yet
    play.see(beats=(Beat(0, "step", 6),))
    assert StandBy() not in play.actions
    assert play.see(beats=(Beat(1, "step", 6),)) == [StandBy()]
    play.train(7, 8)
    assert play.actions.count(StandBy()) == 1
    play.crash()
    play.restart()
    assert play.actions.count(StandBy()) == 1
    play.train(5, 6)
    assert play.actions.count(StandBy()) == 2


def test_nothing_stands_by_for_a_run_that_is_asked_to_end_or_does_not_want_it() -> None:
    asked = Play(replace(LIMITS, standbys=True)).start()
    asked.see(stop=Stop.STOP)
    asked.train(5, 6)
    unwanted = Play().start().train(5, 6)
    assert StandBy() not in asked.actions + unwanted.actions


def test_the_next_attempt_waits_for_all_ranks_to_be_gone_and_for_the_backoff() -> None:
    play = Play().start().train(0)
    play.crash(rank=1)
    assert play.see(offers=offers(2), after=5.0) == []  # rank 0 was killed but is not gone yet
    assert play.bury() == [RecordEnd(1, "failed")]
    assert play.see(offers=offers(2)) == [Place(2)]
    assert play.see(placed=seats(0, 1))[0] == StartRanks(
        2,
        2,
        "rank 1 on host1 was ended by signal 9, likely out of memory (the kernel or an administrator killed it) "
        "at step 0",
    )


def test_a_victim_is_not_blamed_when_the_culprit_shows_later() -> None:
    play = Play().start().train(0, 1)
    assert play.crash(rank=0, code=6) == []
    assert play.state.phase is Phase.SUSPECTING
    play.crash(rank=1, code=-11, after=2.0)
    assert [fault.rank for fault in play.faults] == [1]
    assert "signal 11 (SIGSEGV)" in play.faults[0].message


def test_a_rank_that_was_killed_with_its_node_is_the_nodes_fault_and_one_that_was_killed_alone_its_own() -> None:
    """Ray kills the children of an agent a moment before the agent: the exit comes first."""
    limits = replace(LIMITS, killed_grace_s=0.3)
    play = Play(limits).start().train(0, 1)
    assert play.crash(rank=1) == []
    play.see(lost={1: "the agent on host1 ended"}, after=0.2)
    assert [(fault.cause, fault.rank, fault.host) for fault in play.faults] == [(Cause.NODE, 1, "host1")]

    play = Play(limits).start().train(0, 1)
    assert play.crash(rank=1) == []
    assert play.crash(rank=0, code=6) == []
    assert play.see(after=0.1) == []
    play.see(after=0.2)
    assert [(fault.cause, fault.rank, fault.exit_code) for fault in play.faults] == [(Cause.APPLICATION, 1, -9)]

    play = Play(limits).start().train(0, 1)  # who knows why it ended need not wait
    assert play.crash(rank=1) == []
    play.crash(rank=0, code=3)
    assert [(fault.rank, fault.exit_code) for fault in play.faults] == [(0, 3)]


def test_victims_without_a_culprit_count_once_after_a_grace() -> None:
    play = Play().start().train(0, 1)
    play.crash(rank=0, code=6)
    assert play.crash(rank=1, code=6) == []
    play.see(after=LIMITS.suspect_grace_s)
    assert [(fault.cause, fault.rank) for fault in play.faults] == [(Cause.APPLICATION, None)]


def test_a_user_error_ends_the_run_with_2_and_is_never_tried_again() -> None:
    play = Play().start()
    play.see(exits=(RankExit(0, 6), RankExit(1, 2, "error: batch=3 is wrong")))
    play.bury()
    assert play.outcome is not None
    assert play.outcome.exit_code == 2
    assert "batch=3 is wrong" in play.outcome.reason


@pytest.mark.parametrize(("code", "cause"), [(3, Cause.APPLICATION), (1, Cause.APPLICATION), (7, Cause.NODE)])
def test_exit_codes_are_charged_to_their_budgets(code: int, cause: Cause) -> None:
    play = Play().start().train(0)
    play.crash(code=code)
    assert play.state.failures == {cause: 1}


def test_the_budget_counts_since_the_last_commit_and_the_backoff_doubles_and_resets() -> None:
    play = Play().start()
    waits = []
    for step in (1, 2, 3):
        play.train(step)
        play.crash()
        waits.append(round(play.state.retry_t - play.now, 6))
        play.restart()
    assert waits == [0.5, 1.0, 2.0]
    play.see(committed_step=10)
    assert play.state.failures == {}
    play.train(11)
    play.crash()
    assert round(play.state.retry_t - play.now, 6) == 0.5
    assert play.outcome is None


def test_a_spent_budget_ends_the_run_with_3_and_names_the_key() -> None:
    play = Play().start()
    for step in (1, 2, 3):
        play.train(step)
        play.crash()
        play.restart()
    play.train(4)
    play.crash()
    play.bury()
    assert play.outcome is not None
    assert (play.outcome.event, play.outcome.exit_code) == ("failed", 3)
    assert "cluster.max_application_failures=3" in play.outcome.reason


def test_a_crash_loop_on_one_step_ends_the_run_before_the_budget() -> None:
    limits = replace(LIMITS, max_failures={Cause.APPLICATION: 100, Cause.NODE: 100, Cause.HANG: 100})
    play = Play(limits).start()
    for _ in range(2):
        play.train(7)
        play.crash()
        play.restart()
    play.train(7)
    play.crash()
    play.bury()
    assert play.outcome is not None
    assert "crash loop: 3 attempts in a row ended at step 7" in play.outcome.reason


def test_a_lost_node_shrinks_the_run_only_as_far_as_min_ranks_allows() -> None:
    strict, elastic = Play().start().train(0), Play(replace(LIMITS, min_ranks=1)).start().train(0)
    for play in (strict, elastic):
        play.see(lost={1: "node host1 is lost"})
        assert play.faults[0].cause is Cause.NODE
        play.bury()
        play.now = play.state.retry_t
        play.see(offers=offers(1))
        play.see(offers=offers(1), after=LIMITS.placing_grace_s + 0.1)
    assert not any(isinstance(action, Place) and action.num_ranks == 1 for action in strict.actions)
    assert elastic.actions[-1] == Place(1)


def test_silence_is_a_hang_with_its_own_limits_before_and_after_the_first_step() -> None:
    play = Play().start()
    play.see(after=29.0)
    assert play.faults == []  # imports and restore may take start_timeout_s
    play.train(5, 6)
    play.see(after=9.0, beats=(Beat(0, "step", 7),))
    assert play.see(after=2.0) == [TakeStacks()]
    play.see(after=1.1)
    assert [(fault.cause, fault.rank) for fault in play.faults] == [(Cause.HANG, 1)]
    assert "silent for 11.0 s in phase step at step 6" in play.faults[0].message


def test_a_rank_that_never_starts_is_a_hang_after_start_timeout() -> None:
    play = Play().start()
    assert play.see(after=31.0) == [TakeStacks()]
    play.see(after=1.1)
    assert play.faults[0].cause is Cause.HANG
    assert "while starting" in play.faults[0].message


@pytest.mark.parametrize(
    ("stop", "word", "code", "event"),
    [(Stop.STOP, "stop", 4, "stopped"), (Stop.INTERRUPT, "drain", 5, "interrupted")],
)
def test_a_request_asks_the_ranks_once_and_ends_with_its_code(stop: Stop, word: str, code: int, event: str) -> None:
    play = Play().start().train(0, 1)
    assert play.see(stop=stop) == [AskRanks(word)]
    assert play.see(stop=stop) == []
    play.see(committed_step=2, exits=tuple(RankExit(rank, code) for rank in (0, 1)))
    assert play.outcome == Outcome(event, code, 2)


@pytest.mark.parametrize(("stop", "code"), [(Stop.NOW, 4), (Stop.ABORT, 5)])
def test_stop_now_kills_and_a_second_ctrl_c_too(stop: Stop, code: int) -> None:
    play = Play().start().train(0, 1)
    play.see(stop=Stop.INTERRUPT)
    assert kinds(play.see(stop=stop)) == [KillRanks]
    play.bury()
    assert play.outcome is not None
    assert play.outcome.exit_code == code


def test_a_request_while_nothing_runs_ends_at_once() -> None:
    play = Play()
    play.see(offers=NO_SLOTS)
    play.see(stop=Stop.STOP)
    assert play.outcome == Outcome("stopped", 4)


def test_a_fault_while_ending_is_not_restarted() -> None:
    play = Play().start().train(0, 1)
    play.see(stop=Stop.STOP)
    play.crash()
    play.bury()
    assert play.outcome is not None
    assert play.outcome.event == "stopped"
    assert "a fault while ending" in play.outcome.reason


def test_a_lost_lease_kills_and_ends_with_7() -> None:
    play = Play().start().train(0)
    assert kinds(play.see(fenced="lease 2 is newer")) == [KillRanks]
    play.bury()
    assert play.outcome == Outcome("fenced", 7, reason="lease 2 is newer")


observations = st.builds(
    Observation,
    offers=st.sampled_from([None, NO_SLOTS, offers(1), offers(1, 1), offers(3), offers(1, 2, leaving={1: 5.0})]),
    held=st.sampled_from([NO_SLOTS, NO_SLOTS, offers(1), offers(1, 2), offers(1, 1, leaving={1: 5.0})]),
    placed=st.sampled_from([None, seats(0, 1), seats(0)]),
    place_failed=st.sampled_from([None, "taken"]),
    start_failed=st.sampled_from([None, None, None, "no such file"]),
    exits=st.lists(
        st.builds(RankExit, st.integers(0, 1), st.sampled_from([0, 0, 2, 3, 4, 5, 6, 7, -9, -15])), max_size=2
    ).map(tuple),
    beats=st.lists(
        st.builds(Beat, st.integers(0, 2), st.sampled_from(["start", "data", "step", "save"]), st.integers(0, 9)),
        max_size=3,
    ).map(tuple),
    lost=st.sampled_from([{}, {}, {1: "node lost"}]),
    committed_step=st.sampled_from([None, None, 1, 5]),
    stop=st.sampled_from([None, None, None, Stop.STOP, Stop.INTERRUPT, Stop.NOW]),
)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 40.0), observations), max_size=25))
def test_whatever_is_seen_attempts_never_overlap_and_nothing_follows_the_end(
    story: list[tuple[float, Observation]],
) -> None:
    state, now, running = RunState(), 0.0, False
    for wait, seen in story:
        now += wait
        if not state.asked:
            seen = replace(seen, placed=None, place_failed=None)
        ended = state.phase is Phase.ENDED
        state, actions = decide(state, seen, now, LIMITS)
        assert not (ended and actions)
        for action in actions:
            if isinstance(action, StartRanks):
                assert not running
                running = True
            elif isinstance(action, RecordEnd):
                assert running
                running = False
            elif isinstance(action, Finish):
                assert not running
                assert state.phase is Phase.ENDED


def test_a_time_limit_asks_the_ranks_to_save_and_the_run_can_be_resumed() -> None:
    play = Play(replace(LIMITS, time_limit_s=5.0, stop_timeout_s=3.0)).start().train(1, 2)
    assert play.see(after=5.0, beats=(Beat(0, "step", 3), Beat(1, "step", 3))) == [AskRanks("drain")]
    play.see(exits=(RankExit(0, 5), RankExit(1, 5)))
    assert play.outcome
    assert (play.outcome.event, play.outcome.exit_code) == ("interrupted", 5)
    late = Play(replace(LIMITS, time_limit_s=5.0, stop_timeout_s=3.0)).start().train(1, 2)
    late.see(after=5.0)
    assert kinds(late.see(after=3.1)) == [KillRanks]  # the grace is over


def test_a_run_whose_own_numbers_are_bad_is_not_tried_again() -> None:
    play = Play().start().train(3, 4)
    play.see(exits=(RankExit(0, 8, "2 steps in a row had a non-finite loss"), RankExit(1, 8)))
    play.bury()
    assert play.outcome
    assert (play.outcome.event, play.outcome.exit_code) == ("failed", 3)
    assert "would end the same way" in play.outcome.reason
    assert "non-finite loss" in play.outcome.reason
