"""From a YAML file to a config, or to every problem at once (cases F01-F07)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.config import config_from_dict, load_config, with_overrides
from pretrain.errors import ConfigError, ExitCode
from tests.config.base import changed, problems_of, problems_of_file, values, write


def test_a_config_is_read_with_paths_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prose").mkdir()
    (tmp_path / "prose" / "manifest.json").touch()
    (tmp_path / "tokenizer.json").touch()
    monkeypatch.chdir(tmp_path)
    config = load_config(write(tmp_path / "c.yaml"))
    assert config.tokenizer == str(tmp_path / "tokenizer.json")
    assert config.data.sources["prose"].path == str(tmp_path / "prose")
    monkeypatch.chdir("/")
    assert with_overrides(config, []) == config


def test_the_word_none_means_no_value_where_there_may_be_none_and_itself_elsewhere(tmp_path: Path) -> None:
    optional = ["metrics.layers_every_steps", "checkpoint.directory", "checkpoint.ram_every_steps", "cluster.min_ranks"]
    overrides = [*(f"{name}=none" for name in optional), "engine.offload_optimizer=none"]
    config = load_config(write(tmp_path / "c.yaml"), overrides, check_files=False)
    for name in optional:
        section, field = name.split(".")
        assert getattr(getattr(config, section), field) is None
    assert config.engine.offload_optimizer == "none"
    assert any("is not a number" in problem for problem in problems_of(changed("batch.micro_batch_size", "none")))


# ------------------------------------------------------------------------------------ F01: unknown keys

MISSPELT = {
    "trian.lr": "trian is not known. Every key must be one of the schema's. Remove it; a config knows batch,",
    "learning_rate": "learning_rate is not known. Every key must be one of the schema's. Did you mean optimizer.",
    "optimizer.weigth_decay": "Did you mean optimizer.weight_decay?",
    "num-epochs": "num-epochs is not known.",
    "schedule.total-steps": "Did you mean schedule.total_steps?",
    "engine.gradient_cliping": "engine.gradient_cliping is not known.",
    "engine.gradient_clipping": "Did you mean optimizer.gradient_clipping?",
    "data.sources.prose.wieght": "Did you mean data.sources.prose.weight?",
    "metrics.wandb.projcet": "Did you mean metrics.wandb.project?",
    "model.num_encoder_layers": "model.num_encoder_layers is not known.",
    "Batch.global_batch_size": "Did you mean batch?",
    "<<": "<< is not known.",
}


@pytest.mark.parametrize(("key", "problem"), MISSPELT.items())
def test_an_unknown_key_is_an_error_that_names_the_near_one(key: str, problem: str, tmp_path: Path) -> None:
    in_dict = problems_of(changed(key, 1))
    on_command_line = problems_of_file(write(tmp_path / "c.yaml"), f"{key}=1")
    assert in_dict == on_command_line
    assert len(in_dict) == 1
    assert problem in in_dict[0]


# ----------------------------------------------------------------------------- F02-F04, F06: what values mean


def test_1e_minus_4_is_a_number_in_file_and_on_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "optimizer: {kind: adamw, learning_rate: 1e-4}\n")
    assert load_config(path, check_files=False).optimizer.learning_rate == 1e-4
    other = load_config(path, ["optimizer.learning_rate=2e-4"], check_files=False)
    assert other.optimizer.learning_rate == 2e-4


@pytest.mark.parametrize(("text", "count"), [("1e3", 1000), ("5e8", 500_000_000), ("1_000", 1000), ("7", 7)])
def test_a_count_in_scientific_notation_is_a_whole_number(text: str, count: int, tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", f"engine: {{reduce_bucket_elements: {text}}}\n")
    for config in (
        load_config(path, check_files=False),
        load_config(write(tmp_path / "d.yaml"), [f"engine.reduce_bucket_elements={text}"], check_files=False),
    ):
        assert config.engine.reduce_bucket_elements == count
        assert type(config.engine.reduce_bucket_elements) is int


@pytest.mark.parametrize("text", ["1.5", "010", "12:30", "0x10", "true", ".inf", "ten"])
def test_what_is_no_count_is_refused(text: str, tmp_path: Path) -> None:
    in_file = problems_of_file(write(tmp_path / "c.yaml", f"schedule: {{kind: constant, total_steps: {text}}}\n"))
    on_command_line = problems_of_file(write(tmp_path / "d.yaml"), f"schedule.total_steps={text}")
    assert in_file == on_command_line
    assert len(in_file) == 1
    assert in_file[0].startswith(f"schedule.total_steps={text} ")
    assert in_file[0].endswith("(optimizer steps of the run).")


def test_off_and_no_stay_text_where_text_is_meant(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "name: no\nmetrics: {wandb: {mode: off, entity: NO}}\n")
    config = load_config(path, check_files=False)
    assert (config.name, config.metrics.wandb.mode, config.metrics.wandb.entity) == ("no", "off", "NO")


def test_off_is_false_where_a_flag_is_meant(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path / "c.yaml"), ["model.tied_embeddings=off", "model.qk_norm=yes"], check_files=False
    )
    assert config.model.tied_embeddings is False
    assert getattr(config.model, "qk_norm", None) is True


def test_a_choice_that_is_none_is_refused_with_the_choices() -> None:
    problem = problems_of(changed("model.attention", "off"))[0]
    assert problem.startswith("model.attention=off is not one of auto, varlen, varlen_fa2, ")
    assert problems_of(changed("metrics.wandb.mode", False))[0].startswith(
        "metrics.wandb.mode=false is not one of off,"
    )
    assert problems_of(changed("schedule.kind", "cosin"))[0].endswith("Set schedule.kind=cosine.")


@pytest.mark.parametrize("stage", [True, 4, -1, "two", 1.5])
def test_a_zero_stage_that_is_none_is_refused(stage: Any) -> None:
    assert problems_of(changed("engine.zero_stage", stage))[0].startswith("engine.zero_stage=")


@pytest.mark.parametrize("text", ["None", "null", "", "~"])
def test_none_on_the_command_line_is_null(text: str, tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "eval: {max_rows: 5}\n")
    config = load_config(path, [f"data.cache={text}", f"eval.max_rows={text}"], check_files=False)
    assert config.data.cache is None
    assert config.eval.max_rows is None
    assert problems_of_file(path, f"name={text}")[0].startswith("name=null is empty.")
    assert problems_of_file(path, f"tokenizer={text}")[0].startswith("tokenizer=null is empty.")
    assert problems_of_file(path, f"schedule.total_steps={text}")[0].startswith("schedule.total_steps=null is empty.")


def test_none_in_a_file_is_no_directory_of_that_name(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "data: {cache: None, sources: {a: {path: x}}}\n")
    assert load_config(path, check_files=False).data.cache is None


# -------------------------------------------------------------------------------- F07: numbers that do not fit


def test_a_batch_that_cannot_be_divided_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    problems = problems_of_file(write(tmp_path / "c.yaml"), "batch.global_batch_size=7", "cluster.num_ranks=2")
    assert problems == [
        "batch.global_batch_size=7 is not a multiple of batch.micro_batch_size=2 (7 = 3 x 2 + 1). "
        "A step is a whole number of micro-batches. Set batch.global_batch_size=6 or another batch.micro_batch_size."
    ]


def test_a_value_given_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml")
    assert problems_of_file(path, "batch.global_batch_size=8", "batch.global_batch_size=16") == [
        "batch.global_batch_size is given twice (8 and 16). Only one can hold. Remove one of the two."
    ]
    load_config(path, ["seed=2", "seed=2"], check_files=False)
    path.write_text(path.read_text() + "seed: 2\n")
    assert problems_of_file(path)[0].endswith("has seed a second time. A key may be given once. Remove one of the two.")


# ------------------------------------------------------------------------------------------- all at once


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    text = """
seed: -1
seed: 2
trian: {lr: 1}
model: {family: decoder, vocabulary_size: 300, width: 30, num_heads: 4, feed_forward_width: 64, num_layers: 2}
batch: {global_batch_size: 7, micro_batch_size: 2, sequence_length: 32, shuffle: yes}
optimizer: {kind: adamw}
"""
    path = write(tmp_path / "c.yaml", text)
    problems = problems_of_file(path, "schedule.total_steps=1.5", "nonsense", check_files=True)
    for part in (
        "has seed a second time",
        "'nonsense' is not an override. It must read key=value.",
        "trian is not known",
        "seed=-1 is out of bounds. The rule is at least 0",
        "batch.shuffle is not known",
        "optimizer.learning_rate is missing. It has no default, because it decides the result (peak learning rate)",
        "schedule.total_steps=1.5 is not a whole number",
        "batch.global_batch_size=7 is not a multiple",
        "model.width=30 is not a multiple of model.num_heads=4",
        "/tokenizer.json does not exist. It must be a tokenizer.json.",
        "/prose does not exist. It must be a directory that data build made. Correct the path or build it",
    ):
        assert sum(part in problem for problem in problems) == 1, part
    assert len(problems) == 11
    message = str(ConfigError(problems))
    assert message.startswith("11 problems in the config:\n  - ")
    assert ConfigError(problems).exit_code == ExitCode.USER_ERROR == 2


def test_one_problem_is_told_without_a_list() -> None:
    with pytest.raises(ConfigError, match=r"^seed=-1 is out of bounds\."):
        config_from_dict(changed("seed", -1))


def test_missing_sections_and_wrong_kinds_are_told() -> None:
    content = values()
    del content["model"], content["optimizer"]["kind"], content["seed"]
    content["data"]["sources"] = {}
    content["batch"] = 3
    content["name"] = "a/b"
    problems = "\n".join(problems_of(content))
    for part in (
        "model is missing. The section has no default. Add model: with keys such as",
        "optimizer.kind is missing. It chooses what the section describes: adamw, muon, sgd. Add optimizer.kind.",
        "seed is missing. It has no default, because it decides the result",
        "data.sources={} is out of bounds. The rule is at least 1 of them",
        "batch=3 is not a mapping. It is a section with keys of its own.",
        "name=a/b is not allowed. The rule: name of the run: letters, digits, dot, dash, underscore.",
    ):
        assert part in problems
    assert problems.count("\n") == 5
    assert problems_of(changed("optimizer.kind", "adam")) == [
        "optimizer.kind=adam is not known. The choices are adamw, muon, sgd. Set optimizer.kind=adamw."
    ]


def test_missing_files_are_told_and_urls_are_left_to_their_reader(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    path = write(tmp_path / "c.yaml")
    overrides = [f"data.sources.prose.path={tmp_path}/empty", "data.validation.v.path=s3://bucket/v"]
    problems = problems_of_file(path, f"tokenizer={tmp_path}/tok.json", *overrides, check_files=True)
    assert problems == [
        f"tokenizer={tmp_path}/tok.json does not exist. It must be a tokenizer.json. "
        "Correct the path or make one with pretrain tokenizer train.",
        f"data.sources.prose.path={tmp_path}/empty has no manifest.json. It must be a directory that data build made. "
        "Correct the path or build it with pretrain data build.",
    ]


# --------------------------------------------------------------------------------------- files and extends


def test_a_config_extends_another_relative_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bases").mkdir()
    write(tmp_path / "bases" / "base.yaml", "optimizer: {kind: adamw, learning_rate: 1e-3, beta1: 0.8}\n")
    (tmp_path / "bases" / "middle.yaml").write_text("extends: base.yaml\noptimizer: {learning_rate: 2e-3}\n")
    (tmp_path / "c.yaml").write_text("extends: bases/middle.yaml\nname: child\n")
    monkeypatch.chdir("/")
    config = load_config(tmp_path / "c.yaml", ["optimizer.beta2=0.5"], check_files=False)
    assert config.name == "child"
    assert config.optimizer.model_dump() == {
        "kind": "adamw", "learning_rate": 2e-3, "beta1": 0.8, "beta2": 0.5,
        "weight_decay": 0.1, "eps": 1e-8, "gradient_clipping": 1.0,
    }  # fmt: skip


def test_a_section_of_another_kind_starts_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "base.yaml", "optimizer: {kind: adamw, learning_rate: 1e-3, beta1: 0.8}\n")
    for overrides in (
        ["optimizer.kind=sgd", "optimizer.learning_rate=0.5"],
        ["optimizer.learning_rate=0.5", "optimizer.kind=sgd"],
    ):
        config = load_config(path, overrides, check_files=False)
        assert (config.optimizer.kind, config.optimizer.learning_rate) == ("sgd", 0.5)
    assert problems_of_file(path, "optimizer.kind=sgd")[0].startswith("optimizer.learning_rate is missing")


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    assert problems_of_file(path) == [
        f"config={path} cannot be read: No such file or directory. It must be a YAML file. Correct the path."
    ]
    assert "Is a directory" in problems_of_file(tmp_path)[0]
    for content, problem in (
        (b"", "is empty. A config is a mapping of sections."),
        (b"- a\n", "is not a mapping."),
        (b"a: \xff\n", "is not UTF-8 (byte 3). A config is UTF-8 text. Save it as such."),
        (b"a: [\n", "is not YAML"),
        (b"extends: gone.yaml\n", f"extends={tmp_path}/gone.yaml of {path} cannot be read: No such file"),
        (b"extends: c.yaml\n", "goes in a circle"),
        (b"extends: [a, b]\n", "is not a path. It names one YAML file."),
    ):
        path.write_bytes(content)
        problems = problems_of_file(path)
        assert len(problems) == 1
        assert problem in problems[0]


# --------------------------------------------------------------------------------------------- overrides


def test_overrides_reach_every_depth_and_take_quotes_and_mappings(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path / "c.yaml"),
        [
            "data.sources.web.path=/w",
            "data.sources.web.weight=2",
            'metrics.wandb.project="123"',
            "cluster.environment={A: b, N: '1'}",
            "name=a.b",
            "health.data_timeout_s=5s",
        ],
        check_files=False,
    )
    assert config.data.sources["web"].weight == 2.0
    assert config.metrics.wandb.project == "123"
    assert config.cluster.environment == {"A": "b", "N": "1"}
    assert config.name == "a.b"
    assert config.health.data_timeout_s == 5.0


@pytest.mark.parametrize("item", ["x", "=1", "a..b=1", ".a=1", "a.=1", ""])
def test_what_is_no_override_is_refused(item: str, tmp_path: Path) -> None:
    assert (
        f"{item!r} is not an override. It must read key=value." in problems_of_file(write(tmp_path / "c.yaml"), item)[0]
    )


def test_an_override_with_broken_yaml_is_refused(tmp_path: Path) -> None:
    problems = problems_of_file(write(tmp_path / "c.yaml"), "cluster.environment={A: b")
    assert len(problems) == 1
    assert problems[0].startswith("override cluster.environment, line 1")


def test_a_value_below_a_number_is_refused(tmp_path: Path) -> None:
    assert problems_of_file(write(tmp_path / "c.yaml"), "seed.x=1") == [
        'seed={"x": 1} is a mapping. The rule: a number (seed of everything random).'
    ]


def test_the_import_is_light() -> None:
    script = (
        "import sys, pretrain.config\n"
        "print(sorted({'torch', 'ray', 'deepspeed', 'fsspec', 'numpy'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20, env=os.environ)
    assert run.stdout == "[]\n"


def test_the_password_of_a_url_is_refused_and_not_shown(tmp_path: Path) -> None:
    problems = problems_of_file(write(tmp_path / "c.yaml"), "checkpoint.directory=s3://AKIA:hunter2@bucket/runs")
    assert len(problems) == 1
    assert problems[0].startswith("checkpoint.directory=s3://***@bucket/runs holds a password.")
    assert "hunter2" not in problems[0]
