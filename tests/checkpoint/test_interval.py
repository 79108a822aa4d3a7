"""The advised interval against the exact expected time, and failures against a journal counted by hand."""

from __future__ import annotations

import math

import pytest

from pretrain.checkpoint.interval import FailureRate, best_interval_s, count_failures
from pretrain.config.schema import CheckpointConfig
from pretrain.train.interval import IntervalAdvisor


def wasted(interval_s: float, cost_s: float, failure_s: float) -> float:
    """Expected wall clock per second of training with failures at random (exponential), restart for nothing."""
    return failure_s * (math.exp((interval_s + cost_s) / failure_s) - 1) / interval_s


@pytest.mark.parametrize(("cost_s", "failure_s"), [(0.2, 3600.0), (5.0, 600.0), (30.0, 86400.0), (60.0, 900.0)])
def test_no_other_interval_loses_noticeably_less(cost_s: float, failure_s: float) -> None:
    best = min((wasted(seconds / 10, cost_s, failure_s), seconds / 10) for seconds in range(1, 60_000, 7))
    advised = best_interval_s(cost_s, failure_s)
    assert advised == pytest.approx(best[1], rel=0.02)
    assert wasted(advised, cost_s, failure_s) <= best[0] * 1.0005
    for other in (advised / 2, advised * 2):
        assert wasted(other, cost_s, failure_s) > wasted(advised, cost_s, failure_s)


def test_a_save_that_costs_more_than_a_failure_is_made_once_per_failure() -> None:
    assert best_interval_s(100.0, 40.0) == 40.0


def test_what_was_expected_fades_as_the_run_measures() -> None:
    assert FailureRate().mean_time_s(86400.0) == 86400.0
    assert FailureRate(0, 86400.0).mean_time_s(86400.0) == 172800.0
    assert FailureRate(99, 99 * 3600.0).mean_time_s(3600.0) == 3600.0


def test_the_advice_has_the_numbers_is_told_once_and_says_whether_it_is_applied() -> None:
    asked = CheckpointConfig(every="auto", every_steps=10, expected_failure_hours=2.0)
    advisors = [IntervalAdvisor(config, FailureRate()) for config in (asked, CheckpointConfig(every_steps=10))]
    assert [advisor.advice(None) for advisor in advisors] == [None, None]
    for advisor in advisors:
        for stall_s in (0.4, 0.5, 9.0):
            advisor.note_save(stall_s, 3.0)
    young_s = math.sqrt(2 * 0.5 * 7200)  # of the middle stall; Daly's terms add a percent
    assert advisors[0].seconds == pytest.approx(young_s, rel=0.02)
    applied, told = advisors[0].advice(10.0), advisors[1].advice(None)
    assert applied == (
        "a save costs 0.5 s and a failure is expected every 2 h: best is a save every "
        f"{advisors[0].seconds:.3g} s (about {round((advisors[0].seconds or 0) * 10)} steps); applied"
    )
    assert told is not None
    assert told.endswith("; checkpoint.every=auto applies it")
    assert advisors[0].advice(10.0) is None
    advisors[0].note_save(0.5, 1e5)  # one slow write is not the rule
    assert advisors[0].advice(10.0) is None


def test_failures_and_running_time_are_those_of_the_journal() -> None:
    events: list[tuple[str, float, dict[str, object]]] = [
        ("created", 0.0, {}),
        ("attempt_started", 10.0, {}),
        ("committed", 50.0, {}),
        ("fault", 110.0, {}),
        ("attempt_ended", 111.0, {}),
        ("attempt_started", 120.0, {}),
        ("restored", 121.0, {"tier": "memory"}),
        ("fault", 220.0, {}),
        ("attempt_started", 230.0, {}),
        ("restored", 231.0, {"tier": "durable"}),
        ("interrupted", 330.0, {}),
        ("attempt_started", 1000.0, {}),
        ("restored", 1001.0, {"tier": "durable"}),
    ]
    assert count_failures(events, from_memory=False) == FailureRate(2, 300.0)
    assert count_failures(events, from_memory=True) == FailureRate(1, 300.0)
