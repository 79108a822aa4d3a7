"""`--name` is text as it stands, in both ways of starting a run; an empty one is not passed over."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import cli
from pretrain import __main__ as rank

CONFIG = str(Path(__file__).parents[2] / "configs" / "tests" / "tiny-decoder.yaml")


def _problems(start: str, name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What is wrong with a config whose data is not there, and with its name."""
    words = [CONFIG, "--name", name, "tokenizer=/nowhere/tokenizer.json"]
    code = cli.main(["train", *words]) if start == "pretrain train" else rank.main(words)
    assert code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("start", ["pretrain train", "python -m pretrain"])
def test_an_empty_name_is_refused(start, capsys):
    assert 'name="" ' in _problems(start, "", capsys)


@pytest.mark.parametrize("start", ["pretrain train", "python -m pretrain"])
@pytest.mark.parametrize("name", ["123", "1e5", "off", "null"])
def test_a_name_that_looks_like_a_number_is_a_name(start, name, capsys):
    problems = _problems(start, name, capsys)
    assert "/nowhere/tokenizer.json" in problems
    assert "name=" not in problems
