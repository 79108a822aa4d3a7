"""Every second of hand-made runs, counted on paper."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.monitor.attempts import list_attempts
from launch.monitor.ledger import Kind, Ledger, make_ledger
from tests.monitor.journals import Journal, step, validation


def spent(ledger: Ledger) -> dict[str, float]:
    return {str(kind): round(seconds, 6) for kind, seconds in ledger.seconds.items() if seconds > 1e-9}


def calm() -> tuple[Journal, dict[int, list[dict[str, Any]]]]:
    """4 s to the first attempt, ready at 10, 10 steps of 1 s in two records, validation 2 s, a save of 0.5 s."""
    journal = Journal()
    journal.at(0, "created").at(4, "attempt_started", attempt=1, ranks=2, why="first start")
    journal.at(5, "ranks_started", attempt=1, processes=[])
    journal.at(18, "committed", attempt=1, step=5, checkpoint="step-00000005-a001")
    journal.at(24, "committed", attempt=1, step=10, checkpoint="step-00000010-a001")
    journal.at(24.25, "attempt_ended", attempt=1, outcome="completed").at(24.5, "completed", step=10)
    rows = [step(15, 5, 1.0, wait_s=0.1), validation(17, 5, 2.0), step(22.5, 10, 1.0, stall_s=0.5)]
    return journal, {1: rows}


def test_a_calm_run_is_accounted_for_to_the_last_second() -> None:
    journal, records = calm()
    ledger = make_ledger(journal.events, records)
    assert spent(ledger) == {
        "first start": 10.0,  # 0-4 waiting, 4-5 spawning, 5-10 loading
        "training": 9.5,  # 10-15 and 17.5-22.5, less the waits
        "data wait": 0.5,
        "validation": 2.0,
        "checkpoint stall": 2.0,  # 0.5 in the record, 1.5 for the last one
        "ending": 0.5,
    }
    assert ledger.wall_s == 24.5
    assert ledger.goodput == pytest.approx(9.5 / 24.5)
    assert [(span.phase, span.seconds) for span in ledger.spans[:3]] == [("wait", 4.0), ("spawn", 1.0), ("load", 5.0)]


def test_a_crash_costs_its_lost_steps_and_each_phase_of_the_restart() -> None:
    journal = Journal().at(0, "created").at(0, "attempt_started", attempt=1, ranks=2)
    journal.at(12, "committed", attempt=1, step=10, checkpoint="step-00000010-a001")
    journal.at(25, "fault", attempt=1, cause="application", rank=1, exit_code=-9, message="killed")
    journal.at(26, "attempt_ended", attempt=1, outcome="failed").at(28, "attempt_started", attempt=2, ranks=2)
    journal.at(29, "ranks_started", attempt=2).at(33, "restored", attempt=2, step=10, checkpoint="step-00000010-a001")
    records = {1: [step(12, 10, 1.0), step(17, 15, 1.0)], 2: [step(40, 15, 1.0)]}
    ledger = make_ledger(journal.events, records, now=1041.0)
    assert spent(ledger) == {
        "first start": 2.0,
        "training": 16.0,  # steps 1-10, then 11-15 again, then one second that no record tells of yet
        "rework": 10.0,  # steps 11-15, and 5 s after them: at most as long as one record
        "restart": 13.0,
    }
    (restart,) = ledger.restarts
    assert (restart.attempt, restart.cause, restart.rework_s) == (2, "application", 10.0)
    assert restart.phases == {
        "notice": 3.0,  # 22-25
        "end": 1.0,
        "wait": 2.0,
        "spawn": 1.0,
        "load": 4.0,
        "first step": 2.0,  # 33-35
    }


def test_time_in_which_nobody_trained_is_idle_and_not_a_restart() -> None:
    journal, records = calm()
    journal.events = [event for event in journal.events if event.kind not in ("completed", "attempt_ended")]
    journal.at(24.25, "attempt_ended", attempt=1, outcome="stopped").at(24.5, "stopped", step=10)
    journal.lease = 2
    journal.at(1000, "config_changed", changes=["x"]).at(1003, "attempt_started", attempt=2, ranks=2)
    journal.at(1004, "ranks_started", attempt=2).at(1006, "restored", attempt=2, step=10)
    records[2] = [step(1011, 15, 1.0)]
    ledger = make_ledger(journal.events, records, now=1000 + 1011.0)
    assert spent(ledger)["idle"] == pytest.approx(1000 - 24.5)
    assert spent(ledger)["restart"] == 6.0
    assert ledger.restarts[0].cause == "resume"
    assert "rework" not in spent(ledger)
    assert ledger.busy_goodput == pytest.approx((9.5 + 5.0) / (1011.0 - 975.5))


def test_a_run_that_vanished_ends_with_its_last_lease_renewal() -> None:
    journal = Journal().at(0, "created").at(0, "attempt_started", attempt=1, ranks=1)
    journal.at(10, "committed", attempt=1, step=10, checkpoint="step-00000010-a001")
    records = {1: [step(10, 10, 1.0), step(12, 12, 1.0)]}
    ended = make_ledger(journal.events, records, last_seen={1: 1013.0})
    assert ended.wall_s == 13.0
    assert spent(ended) == {"training": 12.0, "rework": 1.0}
    journal.lease = 2
    journal.at(60, "attempt_started", attempt=2, ranks=1).at(61, "restored", attempt=2, step=10)
    resumed = make_ledger(journal.events, records, now=1061.0, last_seen={1: 1013.0})
    assert spent(resumed) == {"training": 10.0, "rework": 3.0, "idle": 47.0, "restart": 1.0}
    assert resumed.restarts[0].cause == "lost"


def test_what_no_record_explains_is_said_and_not_guessed() -> None:
    journal = Journal().at(0, "created").at(0, "attempt_started", attempt=1, ranks=1)
    journal.at(30, "attempt_ended", attempt=1, outcome="completed").at(30, "completed", step=4)
    ledger = make_ledger(journal.events, {1: [step(2, 2, 1.0), step(30, 4, 1.0)]})
    assert spent(ledger) == {"training": 4.0, "unexplained": 26.0}


def test_an_attempt_without_a_step_is_all_start() -> None:
    journal = Journal().at(0, "created").at(1, "attempt_started", attempt=1, ranks=1)
    journal.at(3, "ranks_started", attempt=1).at(9, "fault", attempt=1, cause="hang", message="silent")
    journal.at(10, "attempt_ended", attempt=1, outcome="failed").at(11, "attempt_started", attempt=2, ranks=1)
    ledger = make_ledger(journal.events, {}, now=1015.0)
    assert spent(ledger) == {"first start": 10.0, "restart": 5.0}
    assert ledger.restarts[0].cause == "hang"


def test_a_restart_whose_restored_event_was_lost_is_found_from_the_checkpoints() -> None:
    journal = Journal().at(0, "created").at(0, "attempt_started", attempt=1, ranks=1)
    journal.at(5, "committed", attempt=1, step=5).at(8, "fault", attempt=1, cause="node")
    journal.at(9, "attempt_started", attempt=2, ranks=1)
    first, second = list_attempts(journal.events, {1: [step(8, 8, 1.0)], 2: [step(12, 7, 1.0)]})
    assert (second.restored_step, first.kept_step) == (5, 5)


def test_a_run_without_events_has_an_empty_ledger() -> None:
    ledger = make_ledger([], {})
    assert (ledger.wall_s, ledger.goodput, ledger.spans) == (0.0, None, ())


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.data())
def test_the_spans_always_add_up_to_the_wall_time(data: st.DataObject) -> None:
    """Whatever the records claim, also nonsense and clocks that disagree: no gap, no overlap, nothing negative."""
    number = st.floats(0, 50)
    journal, records, t = Journal().at(0, "created"), {}, 0.0
    for attempt in range(1, data.draw(st.integers(1, 4)) + 1):
        journal.lease = attempt
        t += data.draw(number)
        journal.at(t, "attempt_started", attempt=attempt, ranks=1)
        if data.draw(st.booleans()):
            journal.at(t + data.draw(number), "restored", attempt=attempt, step=data.draw(st.integers(0, 9)))
        rows, count = [], 0
        for _ in range(data.draw(st.integers(0, 3))):
            t, count = t + data.draw(number), count + data.draw(st.integers(0, 9))
            rows.append(step(t, count, data.draw(number), stall_s=data.draw(number), wait_s=data.draw(number)))
            if data.draw(st.booleans()):
                rows.append(validation(t - data.draw(number), count, data.draw(number)))
        records[attempt] = rows
        if data.draw(st.booleans()):
            t += data.draw(number)
            journal.at(t, "fault", attempt=attempt, cause="node")
    now = data.draw(st.one_of(st.none(), st.just(1000.0 + t + 10)))
    ledger = make_ledger(journal.events, records, now=now)
    for before, after in itertools.pairwise(ledger.spans):
        assert before.end == after.start
        assert before.seconds > 0
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_s, abs=1e-6)
    assert set(ledger.seconds) <= set(Kind)
