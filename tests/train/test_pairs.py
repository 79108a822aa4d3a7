"""The encoder-decoder goes the whole way: JSON lines, packed pairs, ZeRO-2 on two ranks, generated targets."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from launch import cli
from tests.ranks import run_ranks
from tests.tiny import add_pairs, build_tiny, steps_of
from tests.train.rank_programs import trainings

COLOURS = {"red": "rouge", "blue": "bleu", "green": "vert", "small": "petit"}
ANIMALS = {"cat": "chat", "dog": "chien", "bird": "oiseau", "tree": "arbre", "house": "maison"}


def test_a_tiny_encoder_decoder_learns_pairs_until_it_writes_every_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [
        (f"the {colour} {animal}", f"le {ANIMALS[animal]} {COLOURS[colour]}")
        for colour, animal in itertools.product(COLOURS, ANIMALS)
    ]
    tiny = build_tiny(tmp_path)
    add_pairs(tiny, pairs * 20)
    run = tiny.encoder_decoder(
        "name=pairs",
        "schedule.total_steps=250",
        "schedule.warmup_steps=20",
        "optimizer.learning_rate=8e-3",
        "loss.label_smoothing=0",
        "model.dropout=0",
        "checkpoint.every_steps=100",
    )
    results = run_ranks(trainings, ranks=2, arguments={"runs": [run], "home": str(tmp_path / "runs")}, timeout_s=200)
    assert [result.value for result in results] == [[0], [0]], results[0].output[-4000:]
    steps = steps_of(tmp_path / "runs" / "pairs")
    assert steps[1]["loss"] > 4  # ln 300 = 5.7: nothing is known at first
    assert steps[250]["loss"] < 0.05
    capsys.readouterr()
    for source, target in pairs[::7]:
        assert cli.main(["generate", str(tmp_path / "runs" / "pairs"), "--source", source, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["text"].strip() == target
    _the_heads_can_be_looked_at(tmp_path / "runs" / "pairs", capsys)


def _the_heads_can_be_looked_at(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    looked = [*("inspect", "attention", str(run), "--source", "the red cat sees the small tree and the blue bird")]
    assert cli.main([*looked, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert {head["layer"].partition(".")[0] for head in body["heads"]} >= {"encoder", "cross"}
    assert Path(body["picture"]).read_bytes().startswith(b"\x89PNG")
    assert cli.main([*looked, "--layer", "decoder.9"]) == 2
    assert "--layer=decoder.9 does not exist. This model has encoder.0," in capsys.readouterr().err
