"""Hangs: deadlines that are learned, the odd rank out, stragglers; and real processes that stop or sleep."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.controller.hangs import deadline_s, in_collective, odd_one_out, quantiles, stragglers
from launch.controller.state import Beat, PhaseTimes, RankStack, RankView, RecordFault, RecordStraggler, TakeStacks
from tests.launch.test_controller import scene
from tests.launch.test_policy import LIMITS, Play

LEARNED = replace(LIMITS, learned_deadlines=True, heartbeat_timeout_s=60.0, examine_s=1.0, sleepless_s=1.0)
COLLECTIVE = 'File "torch/distributed/distributed_c10d.py", line 1\nFile "pretrain/train/loop.py", line 2'
FORWARD = 'File "torch/nn/functional.py", line 1\nFile "pretrain/train/loop.py", line 2'


class Steps(Play):
    """Two ranks that train in step; `step_s` between two steps, by their own clock."""

    def run(self, steps: int, step_s: float = 0.5, *, own: tuple[float, float] = (0.1, 0.1)) -> Steps:
        for _ in range(steps):
            step = max(view.step for view in self.state.ranks.values()) + 1
            t = self.now + step_s
            beats = [Beat(rank, "data", step, step, t, own[rank]) for rank in (0, 1)]
            beats += [Beat(rank, "step", step, step + 1, t) for rank in (0, 1)]
            self.see(after=step_s, beats=tuple(beats))
        return self

    def wait(self, seconds: float, **seen: Any) -> list[Any]:
        """Looks ten times a second, until something is done."""
        for _ in range(round(seconds * 10)):
            actions = self.see(**seen)
            if actions:
                return actions
        return []


def test_a_deadline_is_three_of_the_longest_and_a_slack_once_enough_are_known() -> None:
    few = PhaseTimes({"step": (0.4, 0.9), "copy": (0.1, 0.2)})
    known = PhaseTimes({"step": (0.4, 0.9, 0.5), "copy": (0.1, 0.3, 0.2), "save": (1.0, 2.0, 1.5)})
    assert deadline_s(few, "step", LEARNED) == 60.0
    # 0.6 s of the two that a hang may take beyond three steps is for its stacks.
    assert deadline_s(known, "step", LEARNED) == pytest.approx(3 * 0.9 + 1.4)
    assert deadline_s(known, "data", LEARNED) == pytest.approx(3 * 0.9 + 1.4)
    assert deadline_s(known, "copy", LEARNED) == pytest.approx(3 * 0.3 + 1.4)
    assert deadline_s(PhaseTimes({**known.seconds, "copy": (0.1, 0.2)}), "copy", LEARNED) == 60.0
    assert deadline_s(known, "save", LEARNED) == pytest.approx(3 * 2.0 + 10)
    assert deadline_s(known, "eval", LEARNED) == 60.0
    assert deadline_s(PhaseTimes({"step": (30.0,) * 3}), "step", LEARNED) == 60.0  # never beyond the fixed one
    assert deadline_s(known, "step", replace(LEARNED, learned_deadlines=False)) == 60.0


def test_a_hang_is_seen_within_three_step_times_and_two_seconds_and_both_stacks_are_asked_for_first() -> None:
    play = Steps(LEARNED)
    play.start()
    play.run(8, 0.5)
    silent_since = play.now
    assert play.wait(10) == [TakeStacks()]
    assert 3 * 0.5 + 1.4 <= play.now - silent_since <= 3 * 0.5 + 1.6  # leaves 0.4 s for the stacks
    actions = play.see(stacks=(RankStack(0, "S", COLLECTIVE), RankStack(1, "S", FORWARD)))
    (fault,) = [action for action in actions if isinstance(action, RecordFault)]
    assert fault.fault.rank == 1
    assert "rank 1 on host1 hung in phase step" in fault.fault.message
    assert "it is not in a collective, and the others are" in fault.fault.message
    assert COLLECTIVE in fault.report
    assert FORWARD in fault.report


@pytest.mark.parametrize(("state", "within_s"), [("T", 3 * 0.5 + 1.7), ("D", 60.5)])
def test_a_stopped_process_hangs_as_in_a_step_also_where_it_might_wait_for_a_disk(state: str, within_s: float) -> None:
    play = Steps(LEARNED)
    play.start()
    play.run(8, 0.5)
    step = play.state.ranks[0].step
    play.see(beats=tuple(Beat(rank, "save", step, step + 2 - rank, play.now) for rank in (0, 1)))
    silent_since = play.now
    play.see(stacks=(RankStack(1, state, ""),))
    assert play.wait(70) == [TakeStacks()]
    assert within_s - 0.5 < play.now - silent_since <= within_s
    assert play.state.suspected is not None
    assert play.state.suspected.rank == 1


def test_a_process_that_was_stopped_and_goes_on_may_wait_for_its_disk() -> None:
    play = Steps(LEARNED)
    play.start()
    play.run(8, 0.5)
    step = play.state.ranks[0].step
    for state in ("T", "S"):
        play.see(stacks=(RankStack(1, state, ""),))
    play.see(beats=(Beat(1, "save", step, step + 1, play.now), Beat(0, "save", step, step + 2, play.now)))
    assert play.wait(50) == []


def test_a_rank_that_is_heard_again_while_it_is_examined_was_only_slow() -> None:
    play = Steps(LEARNED)
    play.start()
    play.run(8, 0.5)
    play.wait(10)
    assert play.state.suspected
    step, slow = play.state.ranks[1].step + 1, play.state.suspected.rank
    assert slow is not None
    assert play.see(beats=(Beat(slow, "data", step, step + 1, play.now),)) == []
    assert play.run(3, 0.5).faults == []


def test_another_rank_that_goes_on_does_not_excuse_the_one_that_hangs() -> None:
    play = Steps(LEARNED)
    play.start()
    play.run(8, 0.5)
    play.wait(10)
    assert play.state.suspected
    other, step = 1 - (play.state.suspected.rank or 0), play.state.ranks[1].step
    for _ in range(12):
        play.see(beats=(Beat(other, "save", step, step + 2, play.now),))
    assert [fault.rank for fault in play.faults] == [play.state.suspected.rank if play.state.suspected else 1 - other]


def test_ranks_that_do_not_answer_for_their_stacks_do_not_hold_the_restart_up() -> None:
    play = Steps(LEARNED)
    play.start()
    play.run(8, 0.5)
    play.wait(10)
    asked = play.now
    assert play.wait(5)
    assert play.now - asked <= 1.2
    assert play.faults[0].message.endswith("nothing tells the ranks apart")


def test_who_waits_for_a_rank_that_still_may_take_its_time_does_not_hang() -> None:
    play = Steps(LEARNED)
    play.start()
    play.run(8, 0.5)
    step = play.state.ranks[0].step + 1
    play.see(beats=(Beat(0, "step", step, step + 2, play.now), Beat(1, "data", step, step + 1, play.now)))
    for _ in range(100):  # rank 1 waits for its data and says so, rank 0 for rank 1
        assert play.wait(0.5, beats=(Beat(1, "data", step, step + 1, play.now),)) == []
    silent_since = play.now
    assert play.wait(10) == [TakeStacks()]
    assert 3 * 0.5 + 1.4 <= play.now - silent_since <= 3 * 0.5 + 1.8


def test_the_first_step_of_a_new_shape_may_compile_and_makes_what_was_known_of_steps_void() -> None:
    play = Steps(replace(LEARNED, start_timeout_s=120.0))
    play.start()
    play.run(8, 0.5)
    step = play.state.ranks[0].step + 1
    play.see(beats=tuple(Beat(rank, "compile", step, step + 1, play.now) for rank in (0, 1)))
    assert play.wait(100) == []
    play.see(beats=tuple(Beat(rank, "step", step, step + 1, play.now) for rank in (0, 1)))
    for _ in range(4):
        assert play.wait(9) == []  # by what was known before, 3 x 0.5 + 1.4 s would be too long
        play.run(1, 0.1)
    silent_since = play.now
    assert play.wait(40) == [TakeStacks()]
    assert 3 * 9 + 1.4 <= play.now - silent_since <= 3 * 9.5 + 2


def test_waiting_for_rows_does_not_make_later_steps_seem_long() -> None:
    play = Steps(LEARNED)
    play.start()
    play.run(8, 0.5)
    step = play.state.ranks[0].step + 1
    for _ in range(40):
        play.wait(0.5, beats=tuple(Beat(rank, "data", step, step + 1, play.now) for rank in (0, 1)))
    play.run(8, 0.5)
    assert max(play.state.times.seconds["step"]) < 1.5


def test_the_silence_of_an_agent_or_of_the_controller_itself_is_no_hang() -> None:
    play = Steps(LEARNED)
    play.start()
    play.run(8, 0.5)
    assert play.wait(10, unheard=frozenset({0, 1})) == []
    play.run(8, 0.5)
    assert play.see(after=30.0) == []  # it slept: nobody was heard meanwhile
    assert play.wait(2) == []


def test_a_rank_whose_words_may_not_have_been_read_yet_is_not_silent() -> None:
    play = Steps(LEARNED)
    play.start()
    play.run(8, 0.5)
    assert play.wait(10, is_part=True) == []
    assert play.wait(1) == [TakeStacks()], "it was silent all the time"


@pytest.mark.parametrize(
    ("change", "stacks", "odd", "how"),
    [
        ({}, [RankStack(0, "S", COLLECTIVE), RankStack(1, "T", "")], 1, "stopped"),
        ({"collective": 6}, [], 1, "not come to collective 7"),
        ({}, [RankStack(0, "R", FORWARD), RankStack(1, "S", COLLECTIVE)], 0, "not in a collective"),
        ({}, [RankStack(0, "S", FORWARD), RankStack(1, "D", "")], 1, "does not answer"),
    ],
)
def test_the_odd_rank_out_is_named_with_how_it_is_known(
    change: dict[str, int], stacks: list[RankStack], odd: int, how: str
) -> None:
    view = RankView(0.0, 0.0, "h", "step", 5, 1, collective=7)
    ranks = {0: view, 1: replace(view, **change)}
    found, why = odd_one_out(ranks, {stack.rank: stack for stack in stacks}, suspected=0)
    assert (found, how in why) == (odd, True), why


def test_only_the_thread_of_the_loop_tells_whether_a_rank_is_in_a_collective() -> None:
    assert in_collective(COLLECTIVE)
    assert not in_collective(f'Thread 1\n{FORWARD}\n\nThread 2\nFile "torch/distributed/distributed_c10d.py"')


def test_a_straggler_is_told_once_with_its_node_and_quantiles() -> None:
    play = Steps(LEARNED)
    play.start()
    play.run(40, 0.5, own=(0.1, 0.3))
    told = [action for action in play.actions if isinstance(action, RecordStraggler)]
    assert [(one.rank, one.host, one.median_s, one.others_median_s) for one in told] == [(1, "host1", 0.3, 0.1)]
    assert [one.rank for one in quantiles(play.state.ranks)] == [1, 0]
    even = Steps(LEARNED)
    even.start()
    even.run(40, 0.5, own=(0.1, 0.12))
    assert stragglers(even.state.ranks, LEARNED) == []


@pytest.mark.parametrize("how", ["stopped", "stopped in a save", "asleep"])
def test_a_rank_that_stops_or_sleeps_is_named_its_stack_kept_and_the_run_goes_on(tmp_path: Path, how: str) -> None:
    do = {"asleep": "hang", "stopped in a save": "stop-in-save"}.get(how)
    faults = [{"attempt": 1, "rank": 1, "step": 20, "do": do}] if do else []
    with scene(tmp_path, {"n": 2}, {"steps": 60, "step_s": 0.05, "faults": faults}) as play:
        pids = play.pids(1)
        play.wait_for(lambda: play.events("committed"))
        if how == "stopped":
            # Fake ranks do not wait for each other: the first may commit before the second has begun.
            play.wait_for(lambda: play.controller and play.controller._state.ranks[1].step > 3)
            os.kill(pids[1], signal.SIGSTOP)
        play.wait_for(lambda: play.events("fault"))
        outcome = play.end()
    fault = play.events("fault")[0].fields
    silent = re.search(r"silent for ([\d.]+) s", fault["message"])
    assert silent
    assert 1.4 < float(silent[1]) < 3 * 0.5 + 2 + 1  # its steps take 0.05 s, on a busy machine well under 0.5
    assert (fault["cause"], fault["rank"]) == ("hang", 1)
    page = (Path(play.run.url) / fault["report"]).read_text()
    assert f"rank 1 on {os.uname().nodename}" in page
    if how == "stopped in a save":
        assert "in phase save" in fault["message"]
    if how != "asleep":
        assert "its process is stopped" in fault["message"]
    else:
        assert "fake_rank.py" in page.partition("--- stacks of rank 1")[2]
    assert outcome.event == "completed"
