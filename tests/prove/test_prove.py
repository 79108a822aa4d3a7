"""The proof itself, on the smallest real run: two rank processes, embedded Ray, real SIGKILLs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.proof import plan_kills
from pretrain.data.tokenizer import train_bpe
from tests.data_read.corpus import random_documents, write_tokens

CONFIG = Path(__file__).parents[2] / "configs/tests/tiny-decoder.yaml"
STEPS, KILLS, SEED = 20, 2, 5


def _command(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    tokenizer = tmp_path / "tokenizer.json"
    train_bpe([Path(__file__).read_text()], 300).save(tokenizer)
    write_tokens(tmp_path / "text", random_documents(600, 40), tokenizer, block_tokens=256, shard_blocks=8)
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "launch.cli",
            "prove",
            str(CONFIG),
            f"tokenizer={tokenizer}",
            f"data.sources.text.path={tmp_path / 'text'}",
            f"schedule.total_steps={STEPS}",
            "batch.global_batch_size=32",  # slower steps: a kill has something to hit
            "checkpoint.every_steps=4",
            *words,
        ],
        env={**os.environ, "PRETRAIN_HOME": str(tmp_path / "runs")},
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_killed_ranks_and_a_killed_trainer_end_with_the_same_bits_as_the_untouched_run(tmp_path: Path) -> None:
    planned = plan_kills(KILLS, total_steps=STEPS, num_ranks=2, seed=SEED)
    done = _command(tmp_path, f"--kills={KILLS}", f"--seed={SEED}", "--json")
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
    assert compared == {"loss", "gradient norm", "data digest", "final weights"}
    (weights,) = [c for c in proof["comparisons"] if c["what"].startswith("final weights")]
    assert len(weights["untouched"]) == 64
    assert list((tmp_path / "runs").iterdir()) == []  # the two runs are gone


@pytest.mark.parametrize("words", [("--kills=0",), ("--kills=19",), ("schedule.total_stepz=3",)])
def test_a_proof_that_cannot_be_made_ends_at_once_with_exit_code_2(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = _command(tmp_path, *words)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert not (tmp_path / "runs").exists()
