"""Whole runs of a mixture of experts that two ranks share: moved to one rank, refused, exported, recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from launch import cli
from launch.trained import open_trained
from pretrain.config import load_config
from pretrain.errors import ConfigError
from pretrain.metrics.definitions import unknown_fields
from pretrain.rundir import RunDirectory
from tests.model.small import lm_batch
from tests.ranks import run_ranks
from tests.tiny import Tiny, build_tiny, steps_of
from tests.train.rank_programs import trainings

COMMON = (
    "schedule.kind=constant",
    "schedule.warmup_steps=2",
    "model.balance_loss=0.5",
    "model.router_z_loss=0.25",
)
ALONE = ("engine.expert_parallel_size=1", "cluster.num_ranks=1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """With runs `whole`, `parts` (half of it) and `plain` (as Mixtral) of two ranks."""
    tiny = build_tiny(tmp_path_factory.mktemp("tiny"))
    runs = [
        tiny.moe("name=whole", *COMMON, "schedule.total_steps=8"),
        tiny.moe("name=parts", *COMMON, "schedule.total_steps=4"),
        tiny.moe("name=plain", *COMMON, "schedule.total_steps=2", "model.qk_norm=off"),
    ]
    _train(2, tiny.folder, runs)
    return tiny


def _train(ranks: int, home: Path, runs: list[list[str]]) -> None:
    results = run_ranks(trainings, ranks=ranks, arguments={"runs": runs, "home": str(home)}, timeout_s=150)
    assert [result.value for result in results] == [[0] * len(runs)] * ranks, results[0].output[-4000:]
    shared = f"experts_shared_by={ranks}" if ranks > 1 else "experts_shared_by=1"
    assert shared in results[0].output


def test_a_run_with_shared_experts_goes_on_with_whole_ones_on_one_rank_and_says_what_changed(tiny: Tiny) -> None:
    words = tiny.moe("name=parts", *COMMON, *ALONE, "schedule.total_steps=8")
    two = tiny.moe("name=parts", *COMMON, "schedule.total_steps=8")
    for given, change, message in (
        (
            words,
            "model.num_experts=8",
            "model.num_experts: 4 -> 8 (refused at a resume). parts was trained with the old value",
        ),
        (
            words,
            "model.experts_per_token=1",
            "model.experts_per_token: 2 -> 1 (refused at a resume). parts was trained with the old value",
        ),
        (two, "engine.expert_parallel_size=3", "engine.expert_parallel_size=3 does not fit model.num_experts=4"),
    ):
        with pytest.raises(ConfigError) as refused:
            RunDirectory.claim(load_config(given[0], [*given[1:], change]), resume="must", home=str(tiny.folder))
        assert message in str(refused.value)
    _train(1, tiny.folder, [[*words, "--resume", "must"]])
    whole, moved = steps_of(tiny.folder / "whole"), steps_of(tiny.folder / "parts")
    assert list(moved) == list(whole) == list(range(1, 9))
    for step, record in whole.items():
        assert moved[step]["data_digest"] == record["data_digest"]
        for field in ("loss", "objective", "gradient_norm", "balance_loss", "router_z_loss", "largest_expert_share"):
            assert moved[step][field] == pytest.approx(record[field], rel=1e-5), (step, field)
    run = RunDirectory.locate(str(tiny.folder / "parts"))
    (change,) = [event.fields["changes"] for event in run.events() if event.kind == "config_changed"]
    told = {line.split(" (")[0] for line in change}
    assert {"engine.expert_parallel_size: 2 -> 1", "cluster.num_ranks: 2 -> 1"} <= told


def test_a_record_tells_of_the_routers_and_the_objective_is_made_of_what_it_tells(tiny: Tiny) -> None:
    for record in steps_of(tiny.folder / "whole").values():
        assert unknown_fields(record) == []
        weighted = 0.5 * record["balance_loss"] + 0.25 * record["router_z_loss"]
        assert record["objective"] == pytest.approx(record["loss"] + weighted, rel=1e-6)
        assert 1 / 4 < record["largest_expert_share"] <= 1 / 2  # a token chooses two of four
        assert 0 <= record["idle_experts"] <= 4  # of two layers: two experts of four always have tokens
        assert record["balance_loss"] > 1.5


@pytest.mark.parametrize(("run", "class_name"), [("whole", "Qwen3MoeForCausalLM"), ("plain", "MixtralForCausalLM")])
def test_what_two_ranks_with_shared_experts_saved_is_the_same_model_in_transformers(
    tiny: Tiny, run: str, class_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRETRAIN_HOME", str(tiny.folder))
    out = tiny.folder / f"{run}-hf"
    assert cli.main(["checkpoint", "export", run, "--out", str(out)]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert type(theirs).__name__ == class_name
    ours, batch = open_trained(run).model, lm_batch([24])
    with torch.no_grad():
        logits = theirs(batch.decoder_ids[None]).logits[0]
        torch.testing.assert_close(ours.eval().logits(batch), logits, atol=1e-5 * float(logits.abs().max()), rtol=0)
    assert float(logits.abs().max()) > 0.5
