"""The proof itself, on the smallest real run: two rank processes, embedded Ray, real SIGKILLs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from launch import cli, prove
from launch.proof import plan_kills
from pretrain.data.tokenizer import train_bpe
from pretrain.errors import PretrainError
from pretrain.metrics import read_attempts
from pretrain.metrics.definitions import unknown_fields
from pretrain.store import Store, open_store
from tests.data_read.corpus import random_documents, write_tokens

CONFIGS = Path(__file__).parents[2] / "configs/tests"
STEPS, KILLS, SEED = 20, 2, 5


def _prove(tmp_path: Path, *words: str, config: str = "tiny-decoder") -> subprocess.CompletedProcess[str]:
    tokenizer = tmp_path / "tokenizer.json"
    train_bpe([Path(__file__).read_text()], 300).save(tokenizer)
    write_tokens(tmp_path / "text", random_documents(600, 40), tokenizer, block_tokens=256, shard_blocks=8)
    overrides = (
        f"tokenizer={tokenizer}",
        f"data.sources.text.path={tmp_path / 'text'}",
        f"schedule.total_steps={STEPS}",
        "batch.global_batch_size=32",  # slower steps: a kill has something to hit
        "checkpoint.every_steps=4",
    )
    return subprocess.run(
        [sys.executable, "-m", "launch.cli", "prove", str(CONFIGS / f"{config}.yaml"), *overrides, *words],
        env={**os.environ, "PRETRAIN_HOME": str(tmp_path / "runs")},
        capture_output=True,
        text=True,
        timeout=880,
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("config", ["tiny-decoder", pytest.param("tiny-moe", marks=pytest.mark.slow)])
def test_killed_ranks_and_a_killed_trainer_end_with_the_same_bits_as_the_untouched_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str
) -> None:
    planned = plan_kills(KILLS, total_steps=STEPS, num_ranks=2, seed=SEED)
    done = _prove(tmp_path, f"--kills={KILLS}", f"--seed={SEED}", "--json", "--keep", config=config)
    assert done.returncode == 0, done.stderr
    proof = json.loads(done.stdout)
    assert proof["equal"]
    assert (proof["steps"], proof["ranks"]) == (STEPS, 2)
    assert [kill["target"] for kill in proof["kills"]] == [kill.target for kill in planned]
    assert {kill["target"] for kill in proof["kills"]} > {"pretrain train"}
    for kill, plan in zip(proof["kills"], planned, strict=True):
        assert plan.step <= kill["step"] < STEPS
        assert "-9" in kill["evidence"]
        assert 0 < kill["back_s"] < 60
    compared = {c["what"].split(",")[0] for c in proof["comparisons"] if c["equal"]}
    assert compared == {"loss", "gradient norm", "data digest", "final state", "final weights"}
    (weights,) = [c for c in proof["comparisons"] if c["what"].startswith("final weights")]
    assert len(weights["untouched"]) == 64
    records = read_attempts(open_store(f"{proof['directory']}/killed"))
    assert list(records) == [1, 2, 3]  # one attempt more for each kill
    assert [unknown_fields(record) for rows in records.values() for record in rows if unknown_fields(record)] == []
    with Image.open(proof["plot"]) as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 500
    _check_generate(proof["directory"], capsys)


def _check_generate(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same checkpoint writes the same text, whether its run was killed or not."""
    texts = set()
    for name in ("untouched", "killed"):
        options = ("--prompt=def ", "--max-tokens=8", "--temperature=1", "--seed=3", "--json")
        assert cli.main(["generate", f"{directory}/{name}", *options]) == 0
        written = json.loads(capsys.readouterr().out)
        assert written["prompt"] == "def "
        assert written["checkpoint"].startswith(f"step-{STEPS:08d}")
        assert 0 < written["tokens"] <= 8 or written["ended"]
        texts.add(written["text"])
    assert len(texts) == 1
    assert cli.main(["generate", f"{directory}/killed", "--prompt=x", "--checkpoint=step-00000999-a001"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "step-00000999-a001" in message


@pytest.mark.parametrize("words", [("--kills=0",), ("--kills=19",), ("schedule.total_stepz=3",)])
def test_a_proof_that_cannot_be_made_ends_at_once_with_exit_code_2(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = _prove(tmp_path, *words)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("keep", [False, True])
def test_the_two_runs_are_removed_unless_they_are_kept(
    tmp_path: Path, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_nothing(options: Any, config: Any, home: Store, *_: Any) -> None:
        home.put("killed.log", b"")
        raise PretrainError("the killed run ended with exit code 3")

    config = SimpleNamespace(
        name="a-run", schedule=SimpleNamespace(total_steps=9), cluster=SimpleNamespace(num_ranks=1)
    )
    monkeypatch.setenv("PRETRAIN_HOME", str(tmp_path))
    monkeypatch.setattr(prove, "load_config", lambda *_: config)
    monkeypatch.setattr(prove, "_train_both", train_nothing)
    said: list[str] = []
    with pytest.raises(PretrainError, match="exit code 3"):
        prove.prove(prove.ProveOptions("a.yaml", keep=keep), said.append)
    left = [path.name for path in tmp_path.iterdir()]
    assert len(left) == int(keep)
    assert said == ([f"kept: {tmp_path / left[0]}"] if keep else [])


def test_a_proof_without_comparisons_is_not_equal() -> None:
    assert not prove.Proof("a-run", 9, 1, 0).equal
    assert "NOT EQUAL" in prove.Proof("a-run", 9, 1, 0).to_text()
