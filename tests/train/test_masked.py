"""The encoder goes the whole way: text, shards, masks, ZeRO-2 on two ranks, until it fills the gaps."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from launch import cli
from tests.ranks import run_ranks
from tests.tiny import CONFIGS, steps_of, validations_of
from tests.train.rank_programs import trainings

WEEK = "monday tuesday wednesday thursday friday saturday sunday".split()


def build(folder: Path) -> None:
    """Weeks that begin on a monday: a missing day follows from its place and its neighbours."""
    rng = random.Random(3)
    texts = [" ".join(WEEK[day % 7] for day in range(rng.randint(5, 30))) + f" {number}" for number in range(600)]
    source = folder / "weeks.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = ["--tokenizer", str(folder / "tokenizer.json")]
    words = ["--vocabulary-size", "300", "--out", str(folder / "tokenizer.json")]
    assert cli.main(["tokenizer", "train", str(source), *words]) == 0
    options = ["--block-tokens", "256", "--validation-fraction", "0.1", "--workers", "1"]
    assert cli.main(["data", "build", str(source), *tokenizer, "--out", str(folder / "weeks"), *options]) == 0


def test_a_tiny_encoder_learns_to_fill_gaps_and_refuses_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build(tmp_path)
    run = [
        str(CONFIGS / "tiny-encoder.yaml"),
        f"tokenizer={tmp_path / 'tokenizer.json'}",
        f"data.sources.text.path={tmp_path / 'weeks' / 'train'}",
        f"data.validation.text.path={tmp_path / 'weeks' / 'validation'}",
        "name=masked",
        "schedule.total_steps=90",
        "schedule.warmup_steps=10",
        "checkpoint.every_steps=90",
        "eval.every_steps=45",
        "optimizer.learning_rate=8e-3",
    ]
    results = run_ranks(trainings, ranks=2, arguments={"runs": [run], "home": str(tmp_path / "runs")}, timeout_s=200)
    assert [result.value for result in results] == [[0], [0]], results[0].output[-4000:]
    home = tmp_path / "runs" / "masked"
    steps = steps_of(home)
    assert steps[1]["loss"] == pytest.approx(math.log(304), rel=0.1)
    last = [steps[step]["loss"] for step in range(81, 91)]
    assert sum(last) / 10 < 0.5 * steps[1]["loss"]
    assert validations_of(home)[90]["text"]["loss"] < 0.5 * steps[1]["loss"]
    capsys.readouterr()
    assert cli.main(["generate", str(home), "--prompt", "monday"]) == 2
    assert "model.family=encoder writes no text" in capsys.readouterr().err
