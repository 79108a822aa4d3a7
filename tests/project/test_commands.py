"""The command line is a contract: its list is frozen here, and help starts at once."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from launch.cli import build_parser, main, parse

# A command or option that goes is a breaking change; one that comes is added here.
COMMANDS = {
    "checkpoint average": ["--dtype", "--last", "--out", "--shard-bytes", "-h"],
    "checkpoint diff": ["--json", "-h"],
    "checkpoint export": ["--checkpoint", "--dtype", "--out", "--shard-bytes", "-h"],
    "checkpoint import": ["--name", "-h"],
    "checkpoint list": ["--json", "-h"],
    "checkpoint pin": ["-h"],
    "checkpoint unpin": ["-h"],
    "checkpoint verify": ["--json", "-h"],
    "cluster down": ["-h"],
    "cluster render": ["--cluster", "--out", "-h"],
    "cluster up": ["--nodes", "--slots", "-h"],
    "data build": [
        *(
            "--address",
            "--completion-field",
            "--json",
            "--memory",
            "--message-template",
            "--messages-field",
            "--over-long",
        ),
        *("--prompt-field", "--ray", "--row-tokens", "--spans-field", "--train-role", "--work", "-h"),
    ],
    "data explain": ["--json", "-h"],
    "data mix": ["--json", "--parts", "--plot", "-h"],
    "data plan": ["--json", "--ranks", "-h"],
    "data reindex": ["--json", "-h"],
    "data repack": ["--json", "--over-long", "--row-tokens", "-h"],
    "data stats": ["--json", "--plot", "-h"],
    "data verify": ["--json", "--threads", "-h"],
    "dashboard": ["--home", "--host", "--port", "-h"],
    "doctor": ["--json", "-h"],
    "generate": [
        *("--average", "--beams", "--checkpoint", "--excerpt", "--gap", "--json", "--mode", "--suffix", "-h"),
    ],
    "evaluate": ["--average", "--checkpoint", "--data", "--follow", "--json", "--pairs", "-h"],
    "inspect attention": ["--checkpoint", "--json", "--layer", "--out", "--prompt", "--target", "-h"],
    "list": ["--json", "-h"],
    "logs": ["--rank", "-f", "-h"],
    "plan": ["--gpus", "--json", "--mtbf-hours", "--price", "-h"],
    "prove": ["--json", "--kills", "-h"],
    "report": ["--json", "-h"],
    "resume": ["--takeover", "-h"],
    "status": ["--json", "-h"],
    "stop": ["--now", "-h"],
    "submit": ["--address", "--name", "--resume", "--wait", "-h"],
    "tokenizer train": ["-h"],
    "train": ["--dry-run", "--name", "--resume", "-h"],
    "watch": ["--every", "--once", "-h"],
}


def leaves(parser: argparse.ArgumentParser, prefix: str = "") -> dict[str, argparse.ArgumentParser]:
    """Every command that can be run, by its words."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                found |= leaves(child, f"{prefix} {name}".strip())
    return found or {prefix: parser}


def test_the_command_list_is_frozen() -> None:
    assert sorted(leaves(build_parser())) == sorted(COMMANDS)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_each_command_keeps_its_options_and_describes_every_argument(command: str) -> None:
    parser = leaves(build_parser())[command]
    options = {option for action in parser._actions for option in action.option_strings}
    assert set(COMMANDS[command]) <= options
    assert parser.description
    undescribed = [action.dest for action in parser._actions if not action.help]
    assert undescribed == []


def test_help_loads_neither_torch_nor_ray_nor_deepspeed() -> None:
    program = (
        "import sys\n"
        "from launch.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'ray', 'deepspeed', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy - {'numpy'}, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result.stderr
    assert "pretrain" in result.stdout


def test_an_unknown_command_ends_with_2_and_names_the_known_ones() -> None:
    result = subprocess.run([sys.executable, "-m", "launch.cli", "trian"], capture_output=True, text=True, timeout=30)
    assert result.returncode == 2
    assert "train" in result.stderr
    assert "Traceback" not in result.stderr


def test_overrides_may_stand_before_and_after_options() -> None:
    words = ["train", "run.yaml", "seed=1", "--name", "first", "schedule.total_steps=5", "--resume", "auto", "a.b=c"]
    args = parse(build_parser(), words)
    assert args.overrides == ["seed=1", "schedule.total_steps=5", "a.b=c"]
    assert (args.name, args.resume) == ("first", "auto")


@pytest.mark.parametrize("words", [["train", "run.yaml", "--nmae=x"], ["status", "run", "a=b"], ["train", "a", "-x"]])
def test_a_word_that_no_command_takes_ends_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(build_parser(), words)
    assert end.value.code == 2
    assert words[-1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["train", "a.yaml", "--resme", "auto"], "unrecognized arguments: --resme auto. Did you mean --resume?"),
        (["data", "mix", "a.yaml", "--seed", "2"], "unrecognized arguments: --seed 2. A value of the config is"),
        (["train", "a.yaml", "--res", "must"], "Did you mean --resume?"),  # a part of an option is none
        (["train", "a.yaml", "--lrr=1"], "--lrr=1. A value of the config is written key=value, without dashes."),
        (["data", "build", "x", "--tokenizer", "y", "--out", "z", "--seeed=1"], "Did you mean --seed?"),
        (["list", "--zzz"], "unrecognized arguments: --zzz\n"),
    ],
)
def test_an_unknown_option_is_an_error_that_names_the_near_one(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert text in capsys.readouterr().err
