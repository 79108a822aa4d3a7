"""An exported checkpoint is the run's weights: transformers loads it, tied, with the run's tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from launch import cli
from pretrain.checkpoint import list_checkpoints, read_weights
from pretrain.data.tokenizer import Tokenizer
from pretrain.rundir import RunDirectory
from tests.ranks import run_ranks
from tests.tiny import add_pairs, build_tiny
from tests.train.rank_programs import trainings


def test_transformers_loads_what_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = build_tiny(tmp_path)
    add_pairs(tiny, [(f"the cat sees {number}", f"a dog finds {number}") for number in range(60)])
    short = ("schedule.total_steps=2", "schedule.warmup_steps=1")
    runs = [tiny.decoder("name=small", *short), tiny.encoder_decoder("name=translator", *short)]
    run_ranks(trainings, ranks=1, arguments={"runs": runs, "home": str(tmp_path)}, timeout_s=120)
    monkeypatch.setenv("PRETRAIN_HOME", str(tmp_path))
    out = tmp_path / "hf"
    assert cli.main(["checkpoint", "export", "small", "--out", str(out)]) == 0
    run = RunDirectory.locate("small")
    (name,) = [info.name for info in list_checkpoints(run.checkpoints)]
    weights = read_weights(run.checkpoints, name)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(model.model.embed_tokens.weight, weights["embedding.weight"])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("the cat sees a tree")["input_ids"]) == "the cat sees a tree"
    assert model.config.eos_token_id == tokenizer.eos_token_id == 0
    assert not (run.store.names(f"checkpoints/{name}/readers"))

    assert cli.main(["checkpoint", "export", "translator", "--out", str(tmp_path / "pairs-hf")]) == 0
    pairs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "pairs-hf")
    assert type(pairs).__name__ == "MarianMTModel"
    assert pairs.config.decoder_start_token_id == Tokenizer.load(str(tiny.tokenizer)).start_id == 2
    assert len(AutoTokenizer.from_pretrained(tmp_path / "pairs-hf")) <= pairs.config.vocab_size

    half = ["checkpoint", "export", "small", "--checkpoint", name, "--dtype", "bfloat16", "--out", str(tmp_path / "b")]
    assert cli.main(half) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype="auto").dtype == torch.bfloat16
    assert cli.main(half) == 2
    assert "exists. An export never overwrites" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir() if ".export-" in path.name) == []
