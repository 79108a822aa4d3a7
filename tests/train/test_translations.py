"""Translations inside a run and by `pretrain evaluate`: the same texts and numbers, and the training stays as it is."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu
import torch

from launch import cli
from launch.trained import open_trained
from pretrain.checkpoint import list_checkpoints, read_weights, weights_sha256
from pretrain.config.schema import RunConfig
from pretrain.data.tokenizer import Tokenizer
from pretrain.generate.load import load_model
from pretrain.rundir import RunDirectory
from pretrain.sequence import Batch, SeqInfo
from tests.ranks import run_ranks
from tests.tiny import Tiny, add_pairs, build_tiny, steps_of, validations_of
from tests.train.rank_programs import trainings
from tests.train.test_pairs import ANIMALS, COLOURS

STEPS, EVERY, NUM_PAIRS, MAX_TOKENS = 120, 60, 15, 24
FRENCH = {**COLOURS, **ANIMALS}
PAIRS = [
    (f"{c} {a} and {d} {b}", f"{FRENCH[a]} {FRENCH[c]} et {FRENCH[b]} {FRENCH[d]}")
    for c, a, d, b in itertools.product(COLOURS, ANIMALS, COLOURS, ANIMALS)
]
HELD = PAIRS[::23]


@dataclass(frozen=True)
class Trained:
    """Folder with the runs `plain` and `translates` of two ranks, and `alone`, which translates with one."""

    folder: Path
    pairs: Path
    held: Path

    def run(self, name: str) -> RunDirectory:
        return RunDirectory.locate(str(self.folder / name))

    def checkpoints(self, name: str) -> list[str]:
        """Newest first."""
        return [info.name for info in list_checkpoints(self.run(name).checkpoints)]

    def samples(self, name: str, step: int) -> list[dict[str, str]]:
        lines = self.run(name).store.get(f"samples/step-{step:08d}.jsonl").decode().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("translations")
    tiny = build_tiny(folder)
    add_pairs(tiny, [pair for pair in PAIRS if pair not in HELD])
    pairs = folder / "held.jsonl"
    pairs.write_text("".join(json.dumps({"en": source, "fr": target}) + "\n" for source, target in HELD))
    build = ["data", "build", str(pairs), "--tokenizer", str(tiny.tokenizer), "--out", str(folder / "held")]
    build += ["--source-field", "en", "--target-field", "fr", "--source-length", "32", "--target-length", "32"]
    assert cli.main([*build, "--rows-per-block", "4", "--workers", "1"]) == 0
    for ranks, names in ((2, ["plain", "translates"]), (1, ["alone"])):
        runs = [_run(tiny, name, pairs, folder / "held") for name in names]
        results = run_ranks(trainings, ranks=ranks, arguments={"runs": runs, "home": str(folder)}, timeout_s=200)
        assert [result.value for result in results] == [[0] * len(runs)] * ranks, results[0].output[-4000:]
    return Trained(folder, pairs, folder / "held")


def _run(tiny: Tiny, name: str, pairs: Path, held: Path) -> list[str]:
    steps = EVERY if name == "alone" else STEPS
    words = [f"name={name}", f"schedule.total_steps={steps}", "schedule.warmup_steps=20", "model.norm_eps=1e-5"]
    words += ["optimizer.learning_rate=8e-3", "loss.label_smoothing=0", f"checkpoint.every_steps={EVERY}"]
    words += [f"eval.every_steps={EVERY}", f"data.validation.held.path={held}"]
    if name != "plain":
        words += [f"eval.translation.pairs={pairs}", "eval.translation.source_field=en", "eval.translation.num_beams=2"]
        words += ["eval.translation.target_field=fr", f"eval.translation.every_steps={EVERY}"]
        words += [f"eval.translation.max_pairs={NUM_PAIRS}", f"eval.translation.max_tokens={MAX_TOKENS}"]
    return tiny.encoder_decoder(*words)


def evaluate(*words: object, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main(["evaluate", *map(str, words), "--json"]) == 0
    body: dict[str, Any] = json.loads(capsys.readouterr().out)
    return body


def plain_loss(model: torch.nn.Module, tokenizer: Tokenizer) -> tuple[float, int, int]:
    """Nats, tokens and bytes of the held-out targets: one pair after the other, one target after the other."""
    nats, count = 0.0, 0
    for source, target in HELD:
        source_ids, target_ids = (
            [*tokenizer.encode_batch([text])[0].tolist(), tokenizer.eos_id] for text in (source, target)
        )
        read = [tokenizer.start_id, *target_ids[:-1]]
        info, source_info = SeqInfo.from_lengths([len(read)]), SeqInfo.from_lengths([len(source_ids)])
        labels = torch.tensor(target_ids)
        batch = Batch(0, torch.tensor(read), info, labels, torch.tensor(source_ids), source_info, 0, 0, 0, 0)
        with torch.no_grad():
            scores = torch.log_softmax(model.logits(batch).double(), -1)
        nats -= math.fsum(float(scores[place, token]) for place, token in enumerate(target_ids))
        count += len(target_ids)
    return nats, count, sum(len(target.encode()) for _, target in HELD)


def assert_is_plain_loss(record: dict[str, Any], model: torch.nn.Module, tokenizer: Tokenizer) -> None:
    nats, tokens, spelled = plain_loss(model, tokenizer)
    assert (record["target_tokens"], record["target_bytes"]) == (tokens, spelled)
    assert record["loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert record["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert record["bits_per_byte"] == pytest.approx(nats / spelled / math.log(2), rel=1e-5)


def test_training_with_translations_is_bit_for_bit_training_without(trained: Trained) -> None:
    plain, other = (steps_of(trained.folder / name) for name in ("plain", "translates"))
    assert list(plain) == list(other) == list(range(1, STEPS + 1))
    for step, record in plain.items():
        for field in ("loss", "gradient_norm", "data_digest", "learning_rate", "tokens"):
            assert other[step][field] == record[field], (step, field)
    losses = [validations_of(trained.folder / name) for name in ("plain", "translates")]
    assert "translation" in losses[1][STEPS]  # its own record, behind that of the losses
    hashes = [
        [weights_sha256(trained.run(name).checkpoints, found) for found in trained.checkpoints(name)]
        for name in ("plain", "translates")
    ]
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == 2


def test_translations_inside_a_run_are_those_of_its_checkpoints_at_one_and_two_ranks(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("translates", "alone"):
        for checkpoint in trained.checkpoints(name):
            step = int(checkpoint[5:13])
            kept = trained.samples(name, step)
            assert [(one["source"], one["reference"]) for one in kept] == HELD[:NUM_PAIRS]
            out = tmp_path / f"{name}-{step}.jsonl"
            body = evaluate(
                *(f"{trained.folder / name}:{checkpoint}", "--pairs", trained.pairs, "--source-field", "en"),
                *("--target-field", "fr", "--max-pairs", NUM_PAIRS, "--beams", 2, "--max-tokens", MAX_TOKENS),
                *("--samples", out),
                capsys=capsys,
            )
            assert [json.loads(line) for line in out.read_text().splitlines()] == kept
            told = validations_of(trained.folder / name)[step]["translation"]
            scores = body["translation"]
            assert (told["bleu"], told["chrf"], told["sentences"]) == (scores["bleu"], scores["chrf"], NUM_PAIRS)
    last = {one["hypothesis"] for one in trained.samples("translates", STEPS)}
    assert len(last) > NUM_PAIRS // 3  # it reads what it translates


def test_scores_are_sacrebleus_and_losses_those_of_the_run_and_of_a_plain_loop(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kept.jsonl"
    fields = ("--source-field", "en", "--target-field", "fr")
    run = trained.folder / "translates"
    body = evaluate(run, "--pairs", trained.pairs, *fields, "--max-tokens", 24, "--samples", out, capsys=capsys)
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(one["source"], one["reference"]) for one in kept] == HELD
    texts = [one["hypothesis"] for one in kept]
    references = [[target for _, target in HELD]]
    assert body["translation"]["bleu"] == sacrebleu.corpus_bleu(texts, references).score
    assert body["translation"]["chrf"] == sacrebleu.corpus_chrf(texts, references).score
    assert 1 < body["translation"]["bleu"] < 100  # else a score could be right by chance
    inside = _losses_inside(trained.run("translates"))
    for field in ("loss", "perplexity", "bits_per_byte"):
        assert body["validation"]["held"][field] == pytest.approx(inside[field], rel=1e-6)
    model = open_trained(str(run))
    assert_is_plain_loss(body["validation"]["held"], model.model, model.tokenizer)


def test_the_mean_of_checkpoints_is_evaluated_as_numpy_has_it(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained.run("plain")
    names = trained.checkpoints("plain")
    parts = [read_weights(run.checkpoints, name) for name in names]
    mean = {
        name: torch.from_numpy(np.mean([part[name].numpy().astype(np.float64) for part in parts], 0, np.float64))
        for name in parts[0]
    }
    config: RunConfig = run.config()
    model = load_model(config, {name: weight.float() for name, weight in mean.items()}, "the mean")
    body = evaluate(trained.folder / "plain", "--average", 2, capsys=capsys)
    assert body["checkpoints"] == names
    assert_is_plain_loss(body["validation"]["held"], model, Tokenizer.load(config.tokenizer))
    newest = evaluate(trained.folder / "plain", capsys=capsys)["validation"]["held"]["loss"]
    assert abs(newest - body["validation"]["held"]["loss"]) > 1e-3


def test_an_exported_model_of_pairs_is_measured_as_its_run(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = trained.folder / "translates", tmp_path / "hf"
    assert cli.main(["checkpoint", "export", str(run), "--out", str(out)]) == 0
    pairs = ("--pairs", trained.pairs, "--source-field", "en", "--target-field", "fr", "--max-tokens", 24)
    there = evaluate(out, "--data", f"held={trained.held}", *pairs, "--beams", 2, capsys=capsys)
    here = evaluate(run, *pairs, "--beams", 2, capsys=capsys)
    assert there["translation"] == here["translation"]
    assert there["validation"]["held"] == pytest.approx(here["validation"]["held"], rel=1e-6)
    model = open_trained(str(out))
    assert_is_plain_loss(there["validation"]["held"], model.model, model.tokenizer)


def _losses_inside(run: RunDirectory) -> dict[str, Any]:
    """The last record of losses that the run made itself."""
    lines = run.store.get("metrics/attempt-001.jsonl").decode().splitlines()
    found = [
        record["validation"]["held"] for line in lines if "held" in (record := json.loads(line)).get("validation", {})
    ]
    last: dict[str, Any] = found[-1]
    return last
