"""An exported checkpoint is the run's weights: transformers loads it, tied, with the run's tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from launch import cli
from launch.evaluation import measure_losses
from launch.trained import open_trained
from pretrain.checkpoint import list_checkpoints, read_weights
from pretrain.config.schema import PrefixLMObjective
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
    runs.append(tiny.decoder("name=prefix", "objective.kind=prefix_lm", "optimizer.learning_rate=0.1", *short))
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
    _an_export_is_asked_as_its_run(tmp_path, capsys)


def _an_export_is_asked_as_its_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prefix LM sees its prompt in both directions, also where only the exported directory is left."""
    out = folder / "prefix-hf"
    assert cli.main(["checkpoint", "export", "prefix", "--out", str(out)]) == 0
    assert json.loads((out / "objective.json").read_text()) == {"kind": "prefix_lm", "bidirectional_prefix": True}
    AutoModelForCausalLM.from_pretrained(out)
    AutoTokenizer.from_pretrained(out)
    held = {"text": str(folder / "text" / "validation")}
    losses = _losses(out, capsys)
    run, export = open_trained("prefix"), open_trained(str(out))
    assert run.run is not None
    batch = run.run.batch.model_copy(update={"sequence_length": 256, "global_batch_size": 4, "micro_batch_size": 4})
    same = replace(run, run=run.run.model_copy(update={"batch": batch, "seed": 0}))  # as an export is measured
    expected = measure_losses(same, held, max_rows=None, say=lambda text: None)["text"]
    assert (losses["target_tokens"], losses["loss"]) == (expected.target_tokens, pytest.approx(expected.loss, abs=1e-6))
    assert run.objective == export.objective == PrefixLMObjective()
    ids = run.writer.prompt("the cat sees a tree under the house").ids
    both, exported = (writer.begin([ids], 1).logits for writer in (run.writer, export.writer))
    assert torch.equal(both, exported)
    (out / "objective.json").unlink()
    causal = open_trained(str(out)).writer.begin([ids], 1).logits
    assert not torch.allclose(both, causal, atol=1e-4)
    assert _losses(out, capsys)["target_tokens"] > 1.5 * expected.target_tokens  # all tokens, not those behind a prefix


def _losses(out: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    capsys.readouterr()
    held = f"text={out.parent / 'text' / 'validation'}"
    assert cli.main(["evaluate", str(out), "--data", held, "--json"]) == 0
    found: dict[str, float] = json.loads(capsys.readouterr().out)["validation"]["text"]
    return found


def test_rows_without_a_token_are_told_and_never_come_out_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = build_tiny(tmp_path)
    add_pairs(tiny, [(f"the cat sees {number}", f"a dog finds {number}") for number in range(60)])
    padded = ("schedule.total_steps=2", "schedule.warmup_steps=1", "model.vocabulary_size=384", "model.dropout=0")
    padded += ("checkpoint.every_steps=1",)
    runs = [tiny.decoder("name=padded", *padded), tiny.encoder_decoder("name=translator", *padded)]
    (trained,) = run_ranks(trainings, ranks=1, arguments={"runs": runs, "home": str(tmp_path)}, timeout_s=120)
    assert trained.value == [0, 0], trained.output[-2000:]
    monkeypatch.setenv("PRETRAIN_HOME", str(tmp_path))
    tokens = Tokenizer.load(str(tiny.tokenizer)).vocabulary_size
    assert tokens < 384
    prompt = torch.tensor([[7, 8, 9]])
    for run, auto in (("padded", AutoModelForCausalLM), ("translator", AutoModelForSeq2SeqLM)):
        capsys.readouterr()
        assert cli.main(["checkpoint", "export", run, "--out", str(tmp_path / f"{run}-hf")]) == 0
        said = f"{tokens} tokens in 384 rows, of which those beyond the tokens are never generated"
        assert said in capsys.readouterr().out
        model = auto.from_pretrained(tmp_path / f"{run}-hf").eval()
        inputs = {} if run == "padded" else {"decoder_input_ids": torch.tensor([[2]])}
        with torch.no_grad():
            rows = model.get_output_embeddings().weight
            rows[tokens:] = 0
            head = dict(model.named_modules())["lm_head"]
            seen: list[torch.Tensor] = []
            hook = head.register_forward_hook(lambda module, given, out, seen=seen: seen.append(given[0][0, -1]))
            model(input_ids=prompt, **inputs)
            rows[tokens:] = 100 * seen[0]  # so that the largest logits are those of rows without a token
            assert int(model(input_ids=prompt, **inputs).logits[0, -1].argmax()) >= tokens
            hook.remove()
            written = model.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False, num_beams=1)
        assert int(written.max()) < tokens
    _the_mean_of_two_is_written_with_their_names(tmp_path, capsys)


def _the_mean_of_two_is_written_with_their_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory.locate("padded")
    names = [info.name for info in list_checkpoints(run.checkpoints)]
    assert [name[:13] for name in names] == ["step-00000002", "step-00000001"]
    command = ["checkpoint", "average", "padded", "--last", "2", "--out", str(folder / "mean")]
    assert cli.main(command) == 0
    assert f"the mean of {', '.join(names)} of padded" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(folder / "mean")
    both = [read_weights(run.checkpoints, name)["embedding.weight"].double() for name in names]
    assert not torch.equal(*both)
    assert torch.equal(model.model.embed_tokens.weight, ((both[0] + both[1]) / 2).float())
    origin = json.loads((folder / "mean" / "origin.json").read_text())
    assert [part["checkpoint"] for part in origin["mean_of"]] == names
    assert cli.main([*command[:4], "3", "--out", str(folder / "more")]) == 2
    assert "holds 2 whole checkpoints, and 3 are to be averaged" in capsys.readouterr().err
    assert not (folder / "more").exists()
