"""Every kind of state comes back bit for bit, is written once, and goes over to any other ranks, stage and offload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import ranks_states
from tests.ranks import run_ranks

MUON = {"kind": "muon", "learning_rate": 0.02, "adam_learning_rate": 0.01, "gradient_clipping": 0.5}
EAGER = {"TORCHDYNAMO_DISABLE": "1"}  # Muon's kernels would be compiled for minutes
CASES: dict[str, dict[str, Any]] = {
    **{
        f"offload {stage} {precision}": {"zero_stage": stage, "precision": precision, "offload_optimizer": "cpu"}
        for stage, precision in ((1, "bf16"), (2, "fp32"), (2, "bf16"), (3, "bf16"))
    },
    **{
        f"bf16 states {stage}": {"zero_stage": stage, "precision": "bf16", "state_precision": "bf16"}
        for stage in (1, 2, 3)
    },
    **{
        f"muon {stage} {precision}": {"zero_stage": stage, "precision": precision, "optimizer": MUON}
        for stage, precision in ((1, "fp32"), (1, "bf16"), (2, "bf16"), (3, "fp32"), (3, "bf16"))
    },
    **{
        f"muon offload {stage}": {
            "zero_stage": stage, "precision": "bf16", "optimizer": MUON, "offload_optimizer": "cpu",
        }
        for stage in (2, 3)
    },
    **{f"fixed {stage}": {"zero_stage": stage, "precision": "bf16", "fixed": True} for stage in (0, 1, 3)},
    "fixed 2": {"zero_stage": 2, "precision": "fp32", "fixed": True},
}  # fmt: skip


MORE = ("offload 2 bf16", "bf16 states 1", "muon 1 bf16", "muon 3 fp32", "muon offload 2", "fixed 1")  # slow
SHORT = tuple(name for name in CASES if name not in MORE)
NAMES = [*SHORT, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    arguments = {"folder": str(tmp_path_factory.mktemp("short")), "cases": {name: CASES[name] for name in SHORT}}
    ranks = run_ranks(ranks_states.everything, ranks=2, arguments=arguments, timeout_s=240, environment=EAGER)
    return [rank.value for rank in ranks]


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    arguments = {"folder": str(tmp_path_factory.mktemp("more")), "cases": {name: CASES[name] for name in MORE}}
    ranks = run_ranks(ranks_states.bitwise, ranks=2, arguments=arguments, timeout_s=240, environment=EAGER)
    return [rank.value for rank in ranks]


@pytest.fixture
def results(request: pytest.FixtureRequest, name: str) -> list[dict[str, Any]]:
    """Of both ranks, for one case."""
    values = request.getfixturevalue("short" if name in SHORT else "more")
    return [value[name] for value in values]


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(results: list[dict[str, Any]], name: str) -> None:
    for result in results:
        assert result["restored"] == 3
        assert result["losses"]
        assert result["state"]
        assert result["scalars"]
        if "fixed" in name:
            assert result["seen"] == [105, 106, 107, 108, 109]


@pytest.mark.parametrize("name", NAMES)
def test_a_tied_matrix_is_one_tensor_before_and_after_and_in_the_files(
    results: list[dict[str, Any]], name: str
) -> None:
    for result in results:
        assert result["tied"]
        assert "embedding.weight" in result["names"]
        assert "head.weight" not in result["names"]


@pytest.mark.parametrize("name", NAMES)
def test_every_number_is_written_once_by_one_rank(results: list[dict[str, Any]], name: str) -> None:
    result = results[0]
    assert result["numbers"] == result["whole"]
    # What both ranks hold (weights at stage 0, frozen ones, buffers, all of Muon's matrices) is shared as well.
    assert sum(result["shares"]) == result["whole"]
    assert max(result["shares"]) < 0.6 * result["whole"]
    adam = ["exp_avg", "exp_avg_sq"]
    groups = {"muon": ["momentum_buffer"], "decay": adam, "no_decay": adam} if "muon" in name else None
    assert result["groups"] == (groups or {"decay": adam, "no_decay": adam})
    fixed = ["buffer", "frozen"] if "fixed" in name else []
    assert result["kinds"] == sorted([*result["groups"], *fixed])
    if "bf16 states" in name:  # three bf16 numbers for each weight, and the headers
        assert result["whole"] * 6 < result["bytes"] < result["whole"] * 6 + 20_000


CHAIN: list[tuple[int, dict[str, Any]]] = [
    (2, {"zero_stage": 1}),
    (4, {"zero_stage": 3, "offload_optimizer": "cpu"}),
    (1, {"zero_stage": 2}),
    (3, {"zero_stage": 0}),
    (2, {"zero_stage": 1, "offload_optimizer": "cpu"}),
]


@pytest.mark.slow
def test_a_run_goes_on_at_other_ranks_stages_and_places_of_the_optimizer(tmp_path: Path) -> None:
    """2 -> 4 -> 1 -> 3 -> 2 ranks, stages 1 -> 3 -> 2 -> 0 -> 1, two steps each, against one of 2 ranks left alone."""
    whole = {"folder": str(tmp_path / "whole"), "case": CHAIN[0][1], "first": 0, "last": 10, "write": False}
    expected = run_ranks(ranks_states.link, ranks=2, arguments=whole, timeout_s=60)[0].value
    history = []
    for number, (ranks, case) in enumerate(CHAIN):
        part = {"folder": str(tmp_path / "chain"), "case": case, "first": 2 * number, "last": 2 * number + 2}
        history += run_ranks(ranks_states.link, ranks=ranks, arguments={**part, "write": True}, timeout_s=60)[0].value
    assert len(history) == len(expected) == 10
    for (loss, norm), (loss_alone, norm_alone) in zip(history, expected, strict=True):
        assert loss == pytest.approx(loss_alone, abs=1e-5)
        assert norm == pytest.approx(norm_alone, rel=1e-4)


@pytest.fixture(scope="module")
def started(short: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [value["starts"] for value in short]


def test_a_new_run_takes_the_weights_and_a_fresh_optimizer(started: list[dict[str, Any]]) -> None:
    for result in started:
        weights = result["weights"]
        step, taken, left, notes = weights["told"]
        assert (step, left, notes) == (3, [], [])
        assert weights["taken"] == sorted(taken)
        assert weights["untouched"] == []
        assert weights["scalars"] == {}
        assert result["bf16"]["told"][3] == ["master was saved as float32 and is bfloat16 from here on"]


def test_only_the_named_part_is_taken_and_the_rest_stays_as_initialised(started: list[dict[str, Any]]) -> None:
    for result in started:
        some, everything = result["some"], result["weights"]["taken"]
        _, taken, left, _ = some["told"]
        assert sorted(taken) == some["taken"]
        assert sorted(left) == some["untouched"]
        assert sorted([*taken, *left]) == everything
        assert {name for name in left if name.startswith("layers.")} == {
            name for name in everything if name.startswith("layers.1.") and "norm" in name
        }


def test_with_its_optimizer_state_the_new_run_trains_as_the_old_one(started: list[dict[str, Any]]) -> None:
    for result in started:
        old, new = result["kept"]["history"]
        assert result["kept"]["scalars"] == {"decay": {"step": 3.0}, "no_decay": {"step": 3.0}}
        for ours, theirs in zip(new, old, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


def test_nothing_is_taken_silently(started: list[dict[str, Any]]) -> None:
    for result in started:
        errors = result["errors"]
        assert "pattern layer.* matches no parameter of this model" in errors["pattern"]
        assert errors["pattern"].startswith("UserError")
        assert "checkpoint.start_from.optimizer=keep with" in errors["part with state"]
        assert "checkpoint=step-00000009-a001 does not exist" in errors["absent"]
        assert "missing in the checkpoint: layers.2." in errors["larger"]
        assert "rank-00001.safetensors does not match its sha256" in errors["damaged"]
        assert result["readers"] == []  # the leases are gone


def test_a_damaged_checkpoint_is_set_aside_until_it_was_verified(short: list[dict[str, Any]]) -> None:
    for value in short:
        result = value["set aside"]
        (one, skipped), (two, skipped_again), (three, still), (four, none) = result["found"]
        assert (one, two, three, four) == (1, 1, 1, 2)
        reason = "rank-00000.safetensors does not match its sha256: its bytes changed between 0 and"
        assert reason in skipped[0][1]
        assert result["listed"][0][1].startswith(f"set aside: {reason}")
        assert skipped_again[0][1].startswith(f"set aside: {reason}")
        assert still
        assert none == []
        assert result["problems"] == []
        assert result["back"] in (True, None)
