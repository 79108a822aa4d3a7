"""A model of transformers as the start of a run: the same weights, the same loss at the first step, trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from launch import cli
from launch.importing import check_same_model
from pretrain.checkpoint import list_checkpoints, read_weights
from pretrain.data.loader import open_loader
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import ConfigError
from pretrain.model.hf.directory import import_model
from pretrain.rundir import RunDirectory
from pretrain.sequence import IGNORED_LABEL
from pretrain.topology import World
from tests.model.small import decoder_config, encoder_config
from tests.ranks import run_ranks
from tests.tiny import build_tiny, steps_of
from tests.train.rank_programs import trainings


def save_theirs(folder: Path) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, rms_norm_eps=1e-5, initializer_range=0.1,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def their_loss(model: Qwen3ForCausalLM, run: RunDirectory, tokenizer: Path) -> float:
    """Mean loss of transformers' model over the run's first global batch, document by document."""
    found = Tokenizer.load(str(tokenizer))
    loader = open_loader(run.config(), found.byte_lengths(), World(), tokenizer_sha256=found.sha256)
    data = loader.read(0, loader.initial_state())
    loader.close()
    total, targets = 0.0, 0
    for batch in data.batches:
        lengths = list(batch.decoder_info.lengths)
        for ids, labels in zip(batch.decoder_ids.split(lengths), batch.labels.split(lengths), strict=True):
            with torch.no_grad():
                logits = model(ids[None]).logits[0]
            total += float(functional.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED_LABEL))
            targets += int((labels != IGNORED_LABEL).sum())
    return total / targets


def test_an_imported_model_is_trained_on_from_its_own_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRETRAIN_HOME", str(tmp_path))
    tiny = build_tiny(tmp_path)
    theirs = save_theirs(tmp_path / "theirs")
    arguments = tiny.decoder("model.dropout=0", "name=more", "schedule.total_steps=3", "cluster.num_ranks=2")
    command = ["checkpoint", "import", str(tmp_path / "theirs"), *arguments]

    assert cli.main([*command, "model.num_layers=3"]) == 2
    assert "model.num_layers=3 is not that of the imported model" in capsys.readouterr().err
    assert not (tmp_path / "more").exists()

    assert cli.main(command) == 0
    run = RunDirectory.locate("more")
    (first,) = [info.name for info in list_checkpoints(run.checkpoints)]
    assert first == "step-00000000-a000"
    _, weights = import_model(tmp_path / "theirs")
    stored = read_weights(run.checkpoints, first)
    assert stored.keys() == weights.keys()
    assert all(torch.equal(stored[name], weights[name]) for name in weights)

    expected = their_loss(theirs, run, tiny.tokenizer)
    run_ranks(
        trainings, ranks=2, arguments={"runs": [[*arguments, "--resume", "auto"]], "home": str(tmp_path)}, timeout_s=120
    )
    steps = steps_of(tmp_path / "more")
    assert steps[1]["loss"] == pytest.approx(expected, abs=1e-5)
    assert steps[3]["loss"] < steps[1]["loss"]

    capsys.readouterr()
    assert cli.main(command) == 2  # the run is there
    assert "exists already" in capsys.readouterr().err
    assert cli.main(["checkpoint", "list", "more", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_an_import_names_every_field_that_differs() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.family=encoder is not .* Its weights are those of model\.family=decoder"
    ):
        check_same_model(encoder_config(), decoder_config())
    same = decoder_config(num_kv_heads=4, head_width=8, dropout=0.1, init_std=0.1, attention="qblock")
    check_same_model(decoder_config(num_kv_heads=None), same)  # what is left out means the same
    with pytest.raises(ConfigError) as caught:
        check_same_model(decoder_config(), decoder_config(qk_norm=True, rope_theta=5e5))
    assert "model.qk_norm=False" in str(caught.value)
    assert "Set model.rope_theta=500000.0" in str(caught.value)
