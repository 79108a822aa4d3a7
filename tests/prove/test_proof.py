"""The pure part of prove: the plan of kills, and a comparison that can fail."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from launch.proof import compare_records, plan_kills
from pretrain.errors import UserError


def test_kills_fall_between_the_first_and_the_last_step_and_hit_ranks_and_the_whole_process() -> None:
    for seed in range(30):
        kills = plan_kills(4, total_steps=10, num_ranks=3, seed=seed)
        steps = [kill.step for kill in kills]
        assert steps == sorted(set(steps))
        assert steps[0] >= 1
        assert steps[-1] <= 8  # with less than a step of delay, at least one step is left to do
        assert sum(kill.rank is None for kill in kills) == 2
        assert all(kill.rank is None or 0 <= kill.rank < 3 for kill in kills)
        assert all(0 <= kill.step_fraction < 1 for kill in kills)
        assert [kill.kind for kill in kills if kill.rank is not None] == ["rank", "ranks"]
    assert {kill.kind for kill in plan_kills(6, total_steps=30, num_ranks=2, seed=1)} == {
        "train",
        "rank",
        "ranks",
        "agent",
    }


def test_the_plan_follows_the_seed_alone() -> None:
    plans = [plan_kills(3, total_steps=50, num_ranks=2, seed=seed) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]


@pytest.mark.parametrize(("kills", "steps", "text"), [(0, 10, "--kills=0"), (9, 10, "schedule.total_steps=20")])
def test_a_plan_that_proves_nothing_or_does_not_fit_is_refused(kills: int, steps: int, text: str) -> None:
    with pytest.raises(UserError, match=text):
        plan_kills(kills, total_steps=steps, num_ranks=1, seed=0)


def _records(steps: range) -> list[dict[str, Any]]:
    return [
        {"step": s, "loss": 1 / s, "gradient_norm": 2.0 / s, "data_digest": f"{s:016x}", "step_s": 0.1} for s in steps
    ]


def _runs() -> tuple[dict[int, list[dict[str, Any]]], dict[int, list[dict[str, Any]]]]:
    untouched = {1: _records(range(1, 11))}
    killed = {1: _records(range(1, 5)), 3: _records(range(3, 11))}  # steps 3 and 4 are repeated
    killed[1].append({"step": 4, "validation": {"prose": {"loss": 9.0}}})
    return untouched, copy.deepcopy(killed)


def test_equal_runs_are_equal_whatever_their_speed() -> None:
    untouched, killed = _runs()
    killed[3][0]["step_s"] = 99.0
    comparisons = compare_records(untouched, killed, 10)
    assert [c.what for c in comparisons] == [
        "loss, 10 steps",
        "loss, 2 repeated steps",
        "gradient norm, 10 steps",
        "gradient norm, 2 repeated steps",
        "data digest, 10 steps",
        "data digest, 2 repeated steps",
    ]
    assert all(c.equal for c in comparisons)


@pytest.mark.parametrize("field", ["loss", "gradient_norm", "data_digest"])
def test_the_last_bit_of_one_step_is_a_difference_and_the_step_is_named(field: str) -> None:
    untouched, killed = _runs()
    value = killed[3][5][field]
    killed[3][5][field] = value * (1 + 2**-52) if isinstance(value, float) else "0" * 16
    (wrong,) = [c for c in compare_records(untouched, killed, 10) if not c.equal]
    assert wrong.what == f"{field.replace('_', ' ')}, step 8 (1 of 10)"
    assert wrong.untouched != wrong.killed


def test_a_step_that_was_lost_after_a_kill_is_a_difference() -> None:
    untouched, killed = _runs()
    killed[3] = killed[3][2:]  # the record of step 5 and later stay, steps 3 and 4 come from the first attempt
    assert all(c.equal for c in compare_records(untouched, killed, 10))
    killed[3] = killed[3][1:]  # step 5 is nowhere
    wrong = [c for c in compare_records(untouched, killed, 10) if not c.equal]
    assert wrong[0].what == "loss, step 5 (1 of 10)"
    assert wrong[0].killed == "missing"


def test_a_repeated_step_that_differs_is_seen_though_the_final_history_is_equal() -> None:
    untouched, killed = _runs()
    killed[1][3]["loss"] = 0.5
    (wrong,) = [c for c in compare_records(untouched, killed, 10) if not c.equal]
    assert wrong.what == "loss, repeated step 4 (1 of 2)"


def test_a_run_that_went_back_by_itself_may_repeat_a_step_as_the_untouched_one_did() -> None:
    spike = {"step": 4, "loss": 99.0, "gradient_norm": 50.0, "data_digest": "f" * 16}
    untouched, killed = _runs()
    untouched[1].insert(4, spike)  # and then the step again, with other rows
    untouched[1].insert(5, untouched[1][3])
    killed[1].insert(4, dict(spike))
    assert all(c.equal for c in compare_records(untouched, killed, 10))
    killed[1][4]["loss"] = 98.0
    (wrong,) = [c for c in compare_records(untouched, killed, 10) if not c.equal]
    assert wrong.what == "loss, repeated step 4 (1 of 3)"


def test_a_record_without_the_field_is_never_equal() -> None:
    untouched, killed = _runs()
    for records in (untouched[1], killed[3], killed[1]):
        for record in records:
            record.pop("data_digest", None)
    assert not all(c.equal for c in compare_records(untouched, killed, 10))
