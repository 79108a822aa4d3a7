"""What differs between two configs, and what a resume may do with each field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pretrain.config import (
    RunConfig,
    config_from_dict,
    config_sha256,
    describe_changes,
    diff_configs,
    dump_yaml,
    with_overrides,
)
from pretrain.config.changes import ConfigChange
from pretrain.config.schema import DecoderConfig, EncoderDecoderConfig, ResumePolicy, SGDConfig
from pretrain.config.walk import all_paths, options_of
from pretrain.config.yaml_text import parse_yaml
from tests.config.base import values

CONFIG = config_from_dict(values())


def changes(*overrides: str) -> list[ConfigChange]:
    return diff_configs(CONFIG, with_overrides(CONFIG, overrides))


def test_equal_configs_do_not_differ() -> None:
    assert changes() == changes("seed=1") == []


def test_each_policy_is_found_where_the_schema_says_it() -> None:
    found = changes(
        "checkpoint.every_steps=7", "optimizer.learning_rate=0.5", "data.sources.prose.weight=2", "seed=2",
        "metrics.wandb.mode=offline", "model.dropout=0.5", "model.num_layers=3",
    )  # fmt: skip
    assert {(c.field, c.old, c.new, c.policy) for c in found} == {
        ("checkpoint.every_steps", 5, 7, "free"),
        ("optimizer.learning_rate", 0.001, 0.5, "logged"),
        ("data.sources.prose.weight", 1.0, 2.0, "segment"),
        ("seed", 1, 2, "refused"),
        ("metrics.wandb.mode", "off", "offline", "free"),
        ("model.dropout", 0.0, 0.5, "logged"),
        ("model.num_layers", 2, 3, "refused"),
    }


def test_an_entry_that_comes_or_goes_has_the_policy_of_its_mapping() -> None:
    added = changes("data.sources.web.path=/w")
    assert [(c.field, c.old, c.policy) for c in added] == [("data.sources.web", None, "segment")]
    assert added[0].new == {"path": "/w", "weight": 1.0, "max_epochs": None}
    assert [(c.field, c.policy) for c in changes("cluster.environment.A=b")] == [("cluster.environment.A", "logged")]
    assert [(c.field, c.policy) for c in changes("data.validation.v.path=/v")] == [("data.validation.v", "free")]


def test_another_kind_of_optimizer_is_refused() -> None:
    found = {c.field: c.policy for c in changes("optimizer.kind=sgd", "optimizer.learning_rate=0.001")}
    assert found["optimizer.kind"] == "refused"


def test_changes_are_described_as_old_to_new_with_their_effect() -> None:
    found = changes(
        "schedule.total_steps=20", "checkpoint.keep_last=3", "data.cache=/a b", "data.sources.prose.weight=2"
    )
    assert describe_changes(found) == [
        "data.sources.prose.weight: 1 -> 2 (applies from the next step on, as a new segment of the data order)",
        'data.cache: null -> "/a b" (changes nothing that is computed)',
        "schedule.total_steps: 10 -> 20 (applies from the next step on)",
        "checkpoint.keep_last: 2 -> 3 (changes nothing that is computed)",
    ]


def test_the_hash_of_a_config_changes_with_any_value_and_with_nothing_else() -> None:
    assert config_sha256(CONFIG) == config_sha256(config_from_dict(dict(reversed(values().items()))))
    others = {config_sha256(with_overrides(CONFIG, [item])) for item in ("seed=2", "loss.z_loss=1e-9", "data.lanes=4")}
    assert len(others | {config_sha256(CONFIG)}) == 4


def test_a_written_config_is_read_back_equal_whatever_its_values_look_like() -> None:
    config = with_overrides(
        CONFIG,
        ["name=no", "metrics.wandb.project='1e3'", "metrics.wandb.entity='off'", "optimizer.learning_rate=1e-5",
         "cluster.environment={A: 'null', B: '010', C: 'a: b', D: ''}", "data.cache='None'"],
    )  # fmt: skip
    content, problems = parse_yaml(dump_yaml(config), "f")
    assert problems == []
    assert config_from_dict(content) == config


def fields_of(section: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        nested = [option for option in options_of(field.annotation) if isinstance(option, type)]
        sections = [option for option in nested if issubclass(option, BaseModel)]
        if sections:
            for inner in sections:
                yield from fields_of(inner)
        else:
            yield f"{section.__name__}.{name}", field


def test_every_field_says_what_it_means_and_what_a_resume_may_do_with_it() -> None:
    fields = dict(fields_of(RunConfig))
    assert {"DecoderConfig.width", "EncoderDecoderConfig.width", "SGDConfig.momentum"} <= set(fields)
    for name, field in fields.items():
        if name.endswith((".kind", ".family")) and name != "ScheduleConfig.kind":
            continue  # they choose the section; a change of them is always refused
        assert field.description, name
        assert isinstance(field.json_schema_extra, dict), name
        assert field.json_schema_extra["resume"] in get_args(ResumePolicy), name


def test_every_path_of_the_schema_is_known() -> None:
    paths = all_paths()
    for section, prefix in ((DecoderConfig, "model"), (EncoderDecoderConfig, "model"), (SGDConfig, "optimizer")):
        assert {f"{prefix}.{name}" for name in section.model_fields} <= set(paths)
    assert "data.sources.NAME.weight" in paths
