"""The engine against a plain PyTorch loop, at every stage, precision and number of ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.engine import ranks_training
from tests.engine.small import plain_loop, run_config
from tests.ranks import RankResult, run_ranks

SGD = {"kind": "sgd", "learning_rate": 0.3, "momentum": 0.9, "weight_decay": 0.01, "gradient_clipping": 2.0}
ADAMW = {"kind": "adamw", "learning_rate": 0.01, "gradient_clipping": 0.5}


def furthest(ours: list[list[float]], reference: list[list[float]]) -> float:
    """Largest relative deviation of losses and norms."""
    assert len(ours) == len(reference)
    pairs = [(a, b) for left, right in zip(ours, reference, strict=True) for a, b in zip(left, right, strict=True)]
    return max(abs(a - b) / max(1e-3, abs(b)) for a, b in pairs)


FP32_CASES = [{"zero_stage": stage, "optimizer": optimizer} for stage in range(4) for optimizer in (ADAMW, SGD)]
BF16_CASES = [{"zero_stage": stage, "precision": "bf16", "optimizer": SGD} for stage in range(4)]


@pytest.fixture(scope="module")
def pair() -> list[RankResult]:
    """Everything that two ranks have to show, from one pair of processes."""
    calls: dict[str, dict[str, Any]] = {
        name: {}
        for name in (
            "non_finite",
            "clipped_lengths",
            "no_targets",
            "rank_without_targets",
            "exact_start",
            "evaluation",
            "gathered",
            "misuse",
        )
    }
    calls["curves"] = {"cases": FP32_CASES, "steps": 20}
    calls["bf16_curves"] = {"cases": BF16_CASES, "steps": 6}
    return run_ranks(ranks_training.several, ranks=2, arguments={"calls": calls}, timeout_s=240)


def test_fp32_curves_of_all_stages_equal_a_plain_loop_for_twenty_steps(pair: list[RankResult]) -> None:
    for case, history in zip(FP32_CASES, pair[0].value["curves"], strict=True):
        reference, _ = plain_loop(run_config(**case), 20)
        assert furthest(history, reference) < 1e-5, case
    assert pair[0].value["curves"] == pair[1].value["curves"]


DROPOUT_CASES: list[dict[str, Any]] = [{"zero_stage": stage, "dropout": 0.2} for stage in range(4)]
DROPOUT_CASES += [{"zero_stage": stage, "dropout": 0.2, "reduce_once": True} for stage in (2, 3)]


@pytest.mark.parametrize(("ranks", "cases"), [(1, DROPOUT_CASES[::2]), (3, DROPOUT_CASES), (4, DROPOUT_CASES[3:4])])
def test_any_number_of_ranks_trains_the_same_with_dropout(ranks: int, cases: list[dict[str, Any]]) -> None:
    # 3 does not divide the 4 micro-batches: two of the six are empty.
    calls = {"curves": {"cases": cases, "steps": 3}, "collectives": {}}
    results = run_ranks(ranks_training.several, ranks=ranks, arguments={"calls": calls}, timeout_s=120)
    reference, _ = plain_loop(run_config(0, dropout=0.2), 3)
    for case, history in zip(cases, results[0].value["curves"], strict=True):
        assert furthest(history, reference) < 1e-5, case
    for result in results:
        sums = result.value["collectives"]
        assert sums["sums"][0] == sum(2**62 - 1 - rank for rank in range(ranks))  # beyond int64
        assert sums["sums"][1] == -5 * ranks
        assert sums["sums"][2] == math.fsum(0.1 * (rank + 1) for rank in range(ranks))
        assert sums["sums"][3] == 1e300 * (ranks - 2)
        assert sums["texts"] == ["ü" * rank for rank in range(ranks)]
        assert sums["long"] == ["ü" * (400 * rank) + "." for rank in range(ranks)]
        assert sums["told"] == "from 0"
        assert sums["failed"] == ("rank 1: no space" if ranks > 1 else "")
        assert sums["infinite"] == ("nan" if ranks > 1 else "inf")


def test_bf16_stays_near_the_fp32_curve(pair: list[RankResult]) -> None:
    reference, _ = plain_loop(run_config(0, optimizer=SGD), 6)
    for history in pair[0].value["bf16_curves"]:
        # bf16 keeps 8 bits: a loss of 4 is known to 0.02; a wrong factor would be off by 2.
        assert furthest(history, reference) < 2e-2


def test_deepspeed_prints_nothing(pair: list[RankResult]) -> None:
    assert [result.output for result in pair] == ["", ""]


def test_a_non_finite_gradient_changes_nothing_on_any_rank_at_any_stage(pair: list[RankResult]) -> None:
    assert len(pair[0].value["non_finite"]) == 8
    for rank in pair:
        for case, result in rank.value["non_finite"].items():
            assert result["applied"] == [True, False, True], case
            assert result["norms"][1] == "inf", case
            assert math.isfinite(float(result["norms"][2])), case
            assert result["unchanged"], case
            assert result["moves_on"], case
            assert result["finite"], case
            assert result["counter"] == 2.0, case


def test_clipping_bounds_the_step_and_the_norm_is_the_one_before_it(pair: list[RankResult]) -> None:
    results = pair[0].value["clipped_lengths"]
    norms = [norm for _, norm in results.values()]
    assert min(norms) > 1.0
    for case, (length, norm) in results.items():
        assert length == pytest.approx(0.1, rel=2e-3), case
        assert norm == pytest.approx(norms[0], rel=2e-2), case


def test_a_step_without_targets_is_finite_and_changes_nothing(pair: list[RankResult]) -> None:
    for case, result in pair[0].value["no_targets"].items():
        assert result == {"loss": [0.0, 0.0, 0.0], "norm": 0.0, "unchanged": True}, case


def test_a_rank_without_targets_adds_nothing_and_spoils_nothing(pair: list[RankResult]) -> None:
    for stage, result in pair[0].value["rank_without_targets"].items():
        assert result["applied"] == [True, True], stage
        assert result["losses"][0] == pytest.approx(result["losses"][1], rel=1e-6), stage
        assert 0 < result["norms"][0] == pytest.approx(result["norms"][1], rel=1e-5), stage
        assert result["apart"] < 1e-6, stage


def test_masters_start_at_the_exact_fp32_weights(pair: list[RankResult]) -> None:
    assert [case for case, exact in pair[0].value["exact_start"].items() if not exact] == []


def test_evaluation_touches_no_training_state_and_repeats_itself(pair: list[RankResult]) -> None:
    assert [case for rank in pair for case, same in rank.value["evaluation"].items() if not same] == []


def test_whole_weights_are_at_hand_on_every_rank(pair: list[RankResult]) -> None:
    for rank in pair:
        assert [case for case, same in rank.value["gathered"].items() if not same or not all(same)] == []


def test_calls_in_the_wrong_order_are_refused(pair: list[RankResult]) -> None:
    assert pair[0].value["misuse"] == [
        "RuntimeError: step after 0 of 2 micro-batches",
        "RuntimeError: micro_step called more than 2 times before step",
    ]
