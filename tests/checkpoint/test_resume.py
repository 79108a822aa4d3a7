"""Resuming: bit for bit at the same ranks and stage, to rounding at others, never from something damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import ranks_checkpoint
from tests.ranks import RankResult, run_ranks

SGD = {"kind": "sgd", "learning_rate": 0.3, "momentum": 0.9}
PLAIN_SGD = {"kind": "sgd", "learning_rate": 0.3}
CASES: list[dict[str, Any]] = [
    *({"zero_stage": stage, "precision": precision} for stage in range(4) for precision in ("fp32", "bf16")),
    {"zero_stage": 2, "optimizer": SGD},
    {"zero_stage": 3, "optimizer": PLAIN_SGD},
]
FP32 = {case["zero_stage"]: number for number, case in enumerate(CASES[:8]) if case["precision"] == "fp32"}
BF16 = {case["zero_stage"]: number for number, case in enumerate(CASES[:8]) if case["precision"] == "bf16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def pair(folder: Path) -> list[RankResult]:
    calls: dict[str, dict[str, Any]] = {"bitwise": {"cases": CASES}, "from_the_start": {}, "damaged": {}, "misfits": {}}
    arguments = {"folder": str(folder), "calls": calls}
    return run_ranks(ranks_checkpoint.several, ranks=2, arguments=arguments, timeout_s=240)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(pair: list[RankResult], number: int) -> None:
    for rank in pair:
        result = rank.value["bitwise"][number]
        assert result["case"] == CASES[number]
        assert result["restored"] == [True, 3, {"step": 3, "rows": 12}, []]
        assert result["losses"]
        assert result["state"]
        assert result["scalars"]
        assert result["sha256"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_ranks_and_stages_go_on_to_rounding(pair: list[RankResult], folder: Path, ranks: int) -> None:
    stages = [(0, 3), (1, 0), (2, 1), (3, 2), (3, 3)] if ranks == 3 else [(3, 0), (0, 2), (2, 3)]
    cases = [{"source": FP32[source], "zero_stage": target} for source, target in stages]
    # Precision may change at a resume too: the masters are the same.
    cases += [{"source": BF16[source], "zero_stage": target, "precision": "bf16"} for source, target in stages[:2]]
    cases += [{"source": BF16[0], "zero_stage": 3}]
    arguments = {"folder": str(folder), "cases": cases}
    results = run_ranks(ranks_checkpoint.resume_others, ranks=ranks, arguments=arguments, timeout_s=120)
    for case, history in zip(cases, results[0].value, strict=True):
        uninterrupted = pair[0].value["bitwise"][case["source"]]["history"][3:]
        exact = case["source"] in FP32.values()
        for ours, reference in zip(history, uninterrupted, strict=True):
            assert ours[0] == pytest.approx(reference[0], rel=1e-5 if exact else 1e-2), case
            assert ours[1] == pytest.approx(reference[1], rel=1e-4 if exact else 5e-2), case


def test_a_checkpoint_of_step_zero_resets_the_optimizer(pair: list[RankResult]) -> None:
    assert [rank.value["from_the_start"] for rank in pair] == [dict.fromkeys("0123", True)] * 2


@pytest.mark.parametrize("kind", ranks_checkpoint.DAMAGE)
def test_damage_is_found_and_the_one_before_is_used(pair: list[RankResult], kind: str) -> None:
    harmless = kind in ("none", "sidecars missing")
    for rank in pair:
        result = rank.value["damaged"][kind]
        assert result["state"]
        assert result["step"] == (2 if harmless else 1)
        assert [name for name, _ in result["skipped"]] == ([] if harmless else ["step-00000002-a001"])
        if not harmless:
            reason = result["skipped"][0][1]
            assert reason == pair[0].value["damaged"][kind]["skipped"][0][1]
            subject = kind.replace("bit of ", "").split(" ")[0]
            assert {"rank": "rank-0000", "manifest": "manifest", "file": "rank-00001"}.get(
                subject, ""
            ) in reason.lower()


@pytest.mark.parametrize("kind", ranks_checkpoint.DAMAGE)
def test_damage_everywhere_is_an_error_and_never_a_fresh_start(pair: list[RankResult], kind: str) -> None:
    for rank in pair:
        result = rank.value["damaged"][f"{kind}, both"]
        if kind in ("none", "sidecars missing"):
            assert result["step"] == 2
        elif kind in ("manifest missing", "only leftovers"):
            assert result is None  # nothing was ever published
        else:
            assert result["error"].startswith("CheckpointError: no good checkpoint in")
            assert "step-00000001-a001: " in result["error"]
            assert "step-00000002-a001: " in result["error"]


def test_what_does_not_fit_is_named(pair: list[RankResult]) -> None:
    messages, others = (rank.value["misfits"] for rank in pair)
    # Both ranks end alike, each naming its own folder, when rank 1 looks into another one.
    assert ".safetensors does not exist." in others.pop("hidden from rank 1")
    assert others == {label: text for label, text in messages.items() if label != "hidden from rank 1"}
    assert messages["empty"] == "None"
    assert messages["named"] == "step-00000001-a001"
    assert "checkpoint=step-00000999-a001 does not exist" in messages["absent"]
    assert "There are: step-00000001-a001." in messages["absent"]
    more = messages["one layer more"]
    assert more.startswith("CheckpointError: step-00000001-a001 does not fit the model.")
    assert "missing in the checkpoint: layers.2." in more
    assert "unexpected in the checkpoint: layers.1." in messages["one layer less"]
    assert "optimizer=SGD does not fit step-00000001-a001, which was saved by AdamW" in messages["other optimizer"]
    assert ".safetensors does not exist." in messages["hidden from rank 1"]
