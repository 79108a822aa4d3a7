"""Each rule between fields, broken once, with its whole text."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pretrain.config import config_from_dict
from tests.config.base import changed, problems_of, values

BROKEN: list[tuple[dict[str, Any], str]] = [
    (
        {"batch.micro_batch_size": 16},
        "batch.global_batch_size=8 is not a multiple .* Set batch.global_batch_size=16 or",
    ),
    ({"data.lanes": 6}, "data.lanes=6 is not a power of two. .* Set data.lanes=4."),
    (
        {"objective": {"kind": "seq2seq"}, "batch.source_length": 8},
        "objective.kind=seq2seq does not fit model.family=decoder",
    ),
    (
        {"objective": {"kind": "ul2", "denoisers": {"a": {"mode": "S", "noise_density": 0.2, "mean_span_tokens": 3}}}},
        "objective.denoisers.a.mean_span_tokens=3.0 does not fit mode S. .* Leave it out",
    ),
    (
        {"objective": {"kind": "ul2", "denoisers": {"a": {"mode": "X", "noise_density": 0.2}}}},
        "objective.denoisers.a.mean_span_tokens=None does not fit mode X. .* Set it",
    ),
    (
        {"objective": {"kind": "span_corruption", "min_document_tokens": 32}},
        "objective.min_document_tokens=32 leaves nothing to learn in rows of batch.sequence_length=32",
    ),
    (
        {"objective": {"kind": "span_corruption"}, "eval.translation": {"pairs": "a.jsonl", "every_steps": 1}},
        "eval.translation does not fit objective.kind=span_corruption. .* set objective.kind=seq2seq",
    ),
    (
        {
            "objective": {
                "kind": "ul2",
                "denoisers": {"a": {"mode": "R", "noise_density": 0.2, "mean_span_tokens": 3}},
            },
            "eval.translation": {"pairs": "a.jsonl", "every_steps": 1},
        },
        "eval.translation does not fit objective.kind=ul2 without a denoiser of mode S",
    ),
    ({"batch.source_length": 8}, "batch.source_length=8 has no effect with objective.kind=causal_lm"),
    ({"eval.every_steps": 5}, "eval.every_steps=5 has no effect without data.validation"),
    ({"model.width": 30}, "model.width=30 is not a multiple of model.num_heads=4"),
    ({"model.head_width": 7}, "a head of width 7 is odd"),
    ({"model.num_kv_heads": 3}, "model.num_kv_heads=3 does not divide model.num_heads=4"),
    (
        {"schedule.warmup_steps": 11},
        "schedule.warmup_steps=11 and schedule.decay_steps=0 exceed schedule.total_steps=10",
    ),
    ({"schedule.decay_steps": 2}, "schedule.decay_steps=2 has no effect with schedule.kind=constant"),
    ({"schedule.kind": "inverse_sqrt"}, "schedule.warmup_steps=0 with schedule.kind=inverse_sqrt"),
    (
        {"health.data_timeout_s": "2m"},
        "health.data_timeout_s=120, .* do not rise. The rule is data < collective < heartbeat",
    ),
    ({"engine.offload_optimizer": "nvme"}, "engine.offload_optimizer=nvme is not supported. .* Set .*=cpu."),
    ({"engine.offload_optimizer": "cpu", "engine.zero_stage": 0}, "engine.offload_optimizer=cpu with .*zero_stage=0"),
    (
        {"engine.state_precision": "bf16", "engine.precision": "fp32"},
        "engine.state_precision=bf16 with engine.zero_stage=2, engine.precision=fp32, .* Set .*_precision=fp32",
    ),
    (
        {"optimizer": {"kind": "muon", "learning_rate": 0.02, "adam_learning_rate": 1e-3}, "engine.zero_stage": 0},
        "optimizer.kind=muon with engine.zero_stage=0 is not supported",
    ),
    ({"cluster.min_ranks": 2}, "cluster.min_ranks=2 is above cluster.num_ranks=1"),
    ({"cluster.environment": {"WANDB_API_KEY": "x"}}, "cluster.environment.WANDB_API_KEY looks like a secret"),
    (
        {"cluster.environment": {"AWS_SECRET_ACCESS_KEY": "x"}},
        "cluster.environment.AWS_SECRET_ACCESS_KEY looks like a secret",
    ),
    ({"cluster.environment": {"HF_TOKEN": "x"}}, "cluster.environment.HF_TOKEN looks like a secret"),
]


def with_values(changes: dict[str, Any]) -> dict[str, Any]:
    content = values()
    for path, value in changes.items():
        section, _, key = path.partition(".")
        if key:
            content.setdefault(section, {})[key] = value
        else:
            content[section] = value
    return content


@pytest.mark.parametrize(("changes", "problem"), BROKEN, ids=[next(iter(changes)) for changes, _ in BROKEN])
def test_a_broken_rule_names_field_rule_and_remedy(changes: dict[str, Any], problem: str) -> None:
    problems = problems_of(with_values(changes))
    assert len(problems) == 1
    assert re.search(problem, problems[0])
    assert problems[0].count(". ") >= 2  # what is wrong, the rule, what to do


def test_the_encoder_decoder_has_rules_of_its_own() -> None:
    model = {
        "family": "encoder_decoder", "vocabulary_size": 300, "width": 33, "num_heads": 3, "feed_forward_width": 64,
        "num_encoder_layers": 1, "num_decoder_layers": 1,
    }  # fmt: skip
    assert [problem.split(".")[0:2] for problem in problems_of(changed("model", model))] == [
        ["objective", "kind=causal_lm does not fit model"],
        ["model", "width=33 is odd"],
    ]
    content = with_values({"model": {**model, "width": 36}, "objective": {"kind": "seq2seq"}})
    assert problems_of(content) == [
        "batch.source_length is missing. A pair source is packed for a source and a target capacity. "
        "Set batch.source_length to the source capacity given to data build."
    ]
    content["batch"]["source_length"] = 16
    assert config_from_dict(content).model.family == "encoder_decoder"


def test_learned_positions_must_reach_what_an_objective_makes_of_a_document() -> None:
    model = {
        "family": "gpt2", "vocabulary_size": 300, "width": 32, "num_heads": 4, "feed_forward_width": 64,
        "num_layers": 1, "max_length": 35,
    }  # fmt: skip
    (problem,) = problems_of(with_values({"model": model, "objective": {"kind": "fill_in_the_middle"}}))
    assert problem.startswith(
        "batch.sequence_length=32 with objective.kind=fill_in_the_middle (up to 36 tokens) is above model.max_length=35"
    )
    assert problem.endswith("Set model.max_length=36 or a shorter batch.sequence_length.")
    assert config_from_dict(with_values({"model": {**model, "max_length": 36}, "objective": {"kind": "prefix_lm"}}))


def test_rules_on_sound_sections_are_told_while_another_section_is_broken() -> None:
    problems = problems_of(with_values({"schedule": None, "data.lanes": 6}))
    assert [problem.split(" ")[0] for problem in problems] == ["schedule=null", "data.lanes=6"]
