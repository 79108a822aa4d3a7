"""The policy about slots: growth, spares, leaving nodes, hosts that are left out, waits that end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.controller.offers import NO_SLOTS, Offer, Slots
from launch.controller.state import (
    AskRanks,
    Beat,
    Cause,
    Evaluate,
    Finish,
    Outcome,
    Phase,
    Place,
    Quarantine,
    RankExit,
    RecordEnd,
    StandBy,
    StartRanks,
    Stop,
)
from tests.launch.test_policy import LIMITS, Play, kinds, offers, seats

ELASTIC = replace(LIMITS, num_ranks=3, min_ranks=1)


def shrunk(limits=ELASTIC) -> Play:
    """A run that wants three ranks and trains on two."""
    play = Play(limits)
    play.see(offers=offers(1, 1))
    assert play.see(offers=offers(1, 1), after=limits.placing_grace_s + 0.1) == [Place(2)]
    play.see(placed=seats(0, 1))
    play.held = offers(1, 1)
    return play.train(0, 1)


def save_and_end(play: Play, step: int, code: int = 5) -> list[object]:
    return play.see(committed_step=step, exits=tuple(RankExit(rank, code) for rank in play.state.ranks))


def test_a_run_grows_after_a_commit_made_for_it_and_no_step_is_done_twice() -> None:
    play = shrunk()
    assert play.see(offers=offers(1, start=2)) == [Place(3, keep=True)]
    play.held = offers(1, 1, 1)
    assert play.see(placed=seats(0, 1, 2)) == [AskRanks("drain")]
    play.train(2)
    assert save_and_end(play, 3) == [RecordEnd(1, "moved")]
    assert play.see() == [Place(3)]
    why = "there are slots for 3 ranks, 2 ran"
    assert play.see(placed=seats(0, 1, 2)) == [StartRanks(2, 3, why)]
    assert play.state.failures == {}


def test_growth_waits_for_standbys_on_the_new_slots_but_not_for_ever() -> None:
    limits = replace(ELASTIC, standbys=True)
    warm, cold = shrunk(limits), shrunk(limits)
    for play in (warm, cold):
        assert play.actions[-1] == StandBy()
        play.see(offers=offers(1, start=2), standbys=2)
        play.held = offers(1, 1, 1)
        assert play.see(placed=seats(0, 1, 2)) == [StandBy()]  # on the new slot too
        play.train(2)
        assert not any(isinstance(action, AskRanks) for action in play.actions)
    assert warm.see(standbys=3) == [AskRanks("drain")]
    beats = tuple(Beat(rank, "step", 9) for rank in (0, 1))
    assert cold.see(beats=beats, after=limits.standbys_within_s + 1.0) == [AskRanks("drain")]


def test_slots_that_are_not_to_be_had_are_asked_for_again_later() -> None:
    play = shrunk()
    play.see(offers=offers(1, start=2))
    assert play.see(place_failed="taken", offers=offers(1, start=2)) == []
    play.train(3)
    assert play.see(offers=offers(1, start=2), after=9.9) == [Place(3, keep=True)]


def test_a_node_that_flaps_makes_the_next_growth_wait_twice_as_long() -> None:
    play, waits = shrunk(), []
    for _ in range(3):
        play.train(22)
        play.see(offers=offers(1, start=2), after=9.0)
        play.train(22)
        play.see(offers=offers(1, start=2), after=2.0)
        play.held = offers(1, 1, 1)
        asked = play.see(placed=seats(0, 1, 2), after=1.0)
        waited = 0.0
        while AskRanks("drain") not in asked:
            beats = tuple(Beat(rank, "step", 5) for rank in play.state.ranks)
            asked = play.see(beats=beats, after=1.0)
            waited += 1.0
            assert waited < 1000.0
        waits.append(waited)
        save_and_end(play, 10 * len(waits))
        play.see()
        play.see(placed=seats(0, 1, 2))
        play.train(20, 21)
        play.held = offers(1, 1)
        play.see(lost={2: f"node host2 is lost {len(waits)}"})
        play.see(exits=tuple(RankExit(rank, -9) for rank in (0, 1)))
        play.now = play.state.retry_t
        play.see(offers=NO_SLOTS)
        play.see(placed=seats(0, 1))
        play.train(20, 21)
    assert waits[0] == 0.0
    assert 40.0 < waits[1] < 65.0
    assert 90.0 < waits[2] < 125.0


def test_spare_slots_are_held_with_standbys_and_take_over_at_once() -> None:
    limits = replace(LIMITS, spare_ranks=1, standbys=True)
    play = Play(limits).start()
    play.held = offers(1, 1)
    play.train(0, 1)
    assert play.see(offers=offers(1, start=2)) == [Place(3, keep=True)]
    play.held = offers(1, 1, 1)
    assert play.see(placed=seats(0, 1, 2)) == [StandBy()]
    play.held = offers(1, 1, start=1)
    play.see(lost={0: "node host0 is lost"})
    play.see(exits=(RankExit(1, -9),))
    assert play.see(offers=None, after=0.6) == [Place(2)]  # no table of Ray is asked
    assert play.see(placed=seats(1, 2))[0].num_ranks == 2


@pytest.mark.parametrize(("left_s", "others", "leaves"), [(300.0, 0, False), (50.0, 0, True), (300.0, 1, True)])
def test_a_leaving_node_is_left_when_there_is_a_replacement_or_no_more_time(
    left_s: float, others: int, leaves: bool
) -> None:
    play = Play(replace(LIMITS, min_ranks=1)).start().train(0, 1)
    play.held = offers(1, 1, leaving={1: left_s})
    actions = play.see(offers=offers(*[1] * others, start=2))
    assert (actions == [AskRanks("drain")]) is leaves
    if leaves:
        assert "node host1 leaves in" in play.state.moving
        save_and_end(play, 2)
        play.now = max(play.now, play.state.retry_t)
        placed = play.see(offers=offers(*[1] * others, start=2))
        assert placed == [Place(1 + others)]


def test_a_node_that_stays_is_used_though_another_one_of_its_host_leaves() -> None:
    play = Play(replace(LIMITS, min_ranks=1)).start().train(0, 1)
    play.held = Slots.of({"node0": Offer(1, "both"), "node1": Offer(1, "both", 50.0)})
    assert play.see() == [AskRanks("drain")]
    save_and_end(play, 2)
    play.now = max(play.now, play.state.retry_t)
    assert play.see() == [Place(1)]


def test_slots_asked_for_while_leaving_nodes_still_train_leave_their_agents_alone() -> None:
    play = Play(replace(LIMITS, num_ranks=4, min_ranks=1)).start(4).train(0, 1)
    play.held = offers(1, 1, 1, 1, leaving={2: 300.0, 3: 300.0})
    assert play.see(offers=offers(1, start=4)) == [Place(3, keep=True)]


def test_a_node_that_had_said_that_it_leaves_is_charged_to_the_preemptions() -> None:
    play = Play().start().train(0, 1)
    play.held = offers(1, 1, leaving={1: 500.0})
    play.see()
    play.see(lost={1: "node host1 is lost"})
    assert play.state.failures == {Cause.PREEMPTION: 1}


def test_ranks_ended_from_outside_cost_a_preemption_in_a_cluster_and_end_the_run_on_one_host() -> None:
    cluster, host = Play().start().train(0, 1), Play(replace(LIMITS, one_host=True)).start().train(0, 1)
    assert save_and_end(cluster, 2) == [RecordEnd(1, "preempted")]
    assert cluster.state.phase is Phase.WAITING
    assert save_and_end(host, 2) == [RecordEnd(1, "interrupted"), Finish(Outcome("interrupted", 5, 2))]


def test_a_request_during_a_move_wins_over_it() -> None:
    play = shrunk()
    play.see(offers=offers(1, start=2))
    play.held = offers(1, 1, 1)
    play.see(placed=seats(0, 1, 2))
    assert play.see(stop=Stop.STOP) == [AskRanks("stop")]
    assert save_and_end(play, 3) == [RecordEnd(1, "stopped"), Finish(Outcome("stopped", 4, 3))]


def test_a_host_with_three_faults_in_a_day_is_left_out_with_the_evidence() -> None:
    play = Play(replace(LIMITS, min_ranks=1, max_failures=dict.fromkeys(Cause, 100))).start()
    for step in (3, 5, 7):
        play.train(step)
        play.held = offers(1, 1)
        actions = play.crash(rank=1, offers=NO_SLOTS)
        if step < 7:
            play.restart()
    (out,) = [action for action in actions if isinstance(action, Quarantine)]
    assert out.host == "host1"
    assert len(out.evidence) == 3
    assert all("rank 1 on host1 was ended by signal 9" in text for text in out.evidence)
    play.bury()
    play.now = play.state.retry_t
    assert play.see(offers=offers(1, 1)) == [Place(2, frozenset({"host1"}))] or play.actions[-1] == Place(
        1, frozenset({"host1"})
    )


def test_old_evidence_does_not_count_and_the_last_hosts_are_never_left_out() -> None:
    old = Play(replace(LIMITS, min_ranks=1, max_failures=dict.fromkeys(Cause, 100))).start()
    strict = Play(replace(LIMITS, max_failures=dict.fromkeys(Cause, 100))).start()
    for play, pause_s in ((old, 50_000.0), (strict, 0.0)):
        for step in (3, 5, 7):
            play.train(step)
            play.held = offers(1, 1)
            play.crash(rank=1)
            play.now += pause_s
            play.restart()
        assert not any(isinstance(action, Quarantine) for action in play.actions)


def test_two_crashes_in_a_row_at_one_step_on_one_host_send_the_third_try_elsewhere() -> None:
    play = Play(replace(LIMITS, min_ranks=1, max_failures=dict.fromkeys(Cause, 100))).start()
    for _ in range(2):
        play.train(7)
        play.held = offers(1, 1)
        actions = play.crash(rank=1)
        if not any(isinstance(action, Quarantine) for action in actions):
            play.restart()
    assert kinds(actions)[-1] is Quarantine
    assert play.outcome is None


def test_a_run_that_knows_of_no_slots_ends_as_interrupted_within_the_bound() -> None:
    play = Play()
    play.see(offers=None)
    play.see(offers=None, after=LIMITS.table_timeout_s - 1.0)
    assert play.outcome is None
    play.see(offers=None, after=2.0)
    assert play.outcome is not None
    assert (play.outcome.event, play.outcome.exit_code) == ("interrupted", 5)
    assert "Ray has told nothing about its nodes for 60 s and no agent is left" in play.outcome.reason


def test_too_few_slots_end_the_run_as_interrupted_after_its_own_bound() -> None:
    play = Play(replace(LIMITS, slots_timeout_s=100.0))
    for _ in range(11):
        play.see(offers=offers(1), after=10.0)
    assert play.outcome is not None
    assert play.outcome.exit_code == 5
    assert "no slots for 2 ranks within cluster.slots_timeout_s=100 s, there are 1" in play.outcome.reason


def test_the_first_start_waits_for_nodes_that_come_up_and_a_restart_does_not() -> None:
    play = Play(ELASTIC)
    assert play.see(offers=offers(1, 1)) == []
    assert play.see(offers=offers(1, 1, 1), after=2.0) == [Place(3)]
    play.see(placed=seats(0, 1, 2))
    play.train(0, 1)
    play.held = offers(1, 1)
    play.see(lost={2: "node host2 is lost"})
    play.see(exits=tuple(RankExit(rank, -9) for rank in (0, 1)))
    assert play.see(after=0.6) == [Place(2)]


def measuring(limits=LIMITS) -> Play:
    """A run of two ranks that measures checkpoints, in training, with a third slot."""
    play = Play(replace(limits, evaluates=True, spare_ranks=1))
    play.start()
    play.held = offers(1, 1, 1)
    return play


def test_checkpoints_are_measured_on_a_spare_slot_once_the_ranks_train_and_by_one_process_at_a_time() -> None:
    play = measuring()
    assert play.see() == []  # the attempt starts: nothing takes CPU from it
    play.train(0)
    assert play.train(1).actions[-1] == Evaluate()
    assert Evaluate() not in play.see(after=100.0, beats=(Beat(0, "step", 2), Beat(1, "step", 2)))
    play.held = offers(1, 1)
    play.see(evaluator_code=0)  # its slot is gone
    assert Evaluate() not in play.see(after=9.0, beats=(Beat(0, "step", 3), Beat(1, "step", 3)))
    play.held = offers(1, 1, 1)
    assert Evaluate() not in play.see(after=0.5, beats=(Beat(0, "step", 4), Beat(1, "step", 4)))
    assert Evaluate() in play.see(after=1.0)


def test_without_a_slot_that_no_rank_has_nothing_is_measured() -> None:
    play = measuring()
    play.held = offers(1, 1)
    play.train(0, 1, 2)
    assert Evaluate() not in play.actions
    plain = Play(replace(LIMITS, spare_ranks=1)).start()
    plain.held = offers(1, 1, 1)
    assert Evaluate() not in plain.train(0, 1, 2).actions


def test_what_measures_checkpoints_and_fails_is_started_three_times_and_is_no_fault_of_the_run() -> None:
    play = measuring().train(0, 1)
    step = 1
    for _ in range(3):
        play.see(evaluator_code=3)
        for _ in range(70):
            step += 1
            play.see(after=1.0, beats=(Beat(0, "step", step), Beat(1, "step", step)))
    assert play.actions.count(Evaluate()) == 3
    assert play.faults == []
    assert play.state.phase is Phase.RUNNING


def test_a_measuring_process_outlives_a_fault_of_the_ranks() -> None:
    play = measuring().train(0, 1)
    play.crash()
    play.restart()
    assert play.state.evaluating
    assert Evaluate() not in play.train(2, 3).actions[play.actions.index(Evaluate()) + 1 :]


def test_a_run_on_one_host_takes_its_spare_slots_with_the_ranks_but_never_more_ranks() -> None:
    play = Play(replace(LIMITS, one_host=True, spare_ranks=1))
    assert play.see(offers=offers(4), after=LIMITS.placing_grace_s + 0.1) == [Place(3)]
    assert play.see(placed=seats(0, 0, 0)) == [StartRanks(1, 2, "first start")]
    assert len(play.state.ranks) == 2
    short = Play(replace(LIMITS, one_host=True, spare_ranks=1))
    assert short.see(offers=offers(2), after=LIMITS.placing_grace_s + 0.1) == [Place(2)]
