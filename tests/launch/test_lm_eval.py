"""An exported model under lm-evaluation-harness, on local files, has the likelihoods that it has here."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from launch import cli
from launch.trained import Trained, open_trained
from pretrain.sequence import IGNORED_LABEL, Batch, SeqInfo
from tests.ranks import run_ranks
from tests.tiny import build_tiny
from tests.train.rank_programs import trainings

ROW_TOKENS = 32  # of the tiny configs; the harness reads longer texts in windows of so many
TEXTS = [
    "the cat sees a tree",
    " ".join(f"a dog runs under the {colour} house and {n}." for n, colour in enumerate(["red", "blue", "green"] * 5)),
    "Grün, naïve: 日本\nthe bird",
]
QUESTIONS = [
    {"question": "the cat sees a", "choices": ["dog under the tree", "zzzz"], "answer": 0},
    {"question": "then the bird", "choices": ["qqqq", "finds a small house", "x"], "answer": 1},
    {"question": "a blue tree", "choices": ["and", "runs"], "answer": 1},
    {"question": "the house", "choices": ["slowly and then over the red dog", "near"], "answer": 0},
]
MIXTRAL = (
    *("model.family=moe", "model.vocabulary_size=300", "model.width=32", "model.num_layers=2", "model.num_heads=4"),
    *("model.feed_forward_width=32", "model.num_experts=4"),
)
PERPLEXITY_YAML = """\
task: local_text
dataset_path: json
dataset_kwargs: {data_files: {test: TEXTS}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""
CHOICE_YAML = """\
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
"""
# Not by its command, which reads its own 14,000 tasks first: that takes a minute.
PROGRAM = """\
import json, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
tasks = TaskManager(include_path=sys.argv[1], include_defaults=False)
found = []
for directory in sys.argv[2:]:
    measured = simple_evaluate(
        model="hf", model_args={"pretrained": directory, "dtype": "float32"}, device="cpu", batch_size=2,
        tasks=["local_text", "local_choice"], task_manager=tasks, bootstrap_iters=0,
    )
    found.append({name: measured[name] for name in ("results", "samples")})
print(json.dumps(found, default=str))
"""


def test_the_harness_measures_an_exported_model_as_it_is_measured_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRETRAIN_HOME", str(tmp_path / "runs"))
    tiny = build_tiny(tmp_path)
    short = ("schedule.total_steps=25", "optimizer.learning_rate=2e-2", "checkpoint.every_steps=25")
    runs = [tiny.decoder("name=llama", *short, "model.qk_norm=false"), tiny.decoder("name=mixtral", *short, *MIXTRAL)]
    arguments = {"runs": runs, "home": str(tmp_path / "runs")}
    (trained,) = run_ranks(trainings, ranks=1, arguments=arguments, timeout_s=120)
    assert trained.value == [0, 0], trained.output[-3000:]
    names = ["llama", "mixtral"]
    for name in names:
        assert cli.main(["checkpoint", "export", name, "--out", str(tmp_path / f"{name}-hf")]) == 0
    found = _measure(tmp_path, [tmp_path / f"{name}-hf" for name in names])
    for name, measured in zip(names, found, strict=True):
        results, samples = measured["results"], measured["samples"]
        model = open_trained(name)
        _likelihoods_of_texts_are_ours(model, results["local_text"], samples["local_text"])
        _choices_are_ours(model, results["local_choice"], samples["local_choice"])


def _measure(folder: Path, models: list[Path]) -> Any:
    """What the harness finds for each model, without a network."""
    tasks = folder / "tasks"
    tasks.mkdir()
    for name, rows, yaml in (
        ("TEXTS", [{"text": text} for text in TEXTS], PERPLEXITY_YAML),
        ("QUESTIONS", QUESTIONS, CHOICE_YAML),
    ):
        (tasks / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tasks / f"{name}.yaml").write_text(yaml.replace(name, str(tasks / f"{name}.jsonl")))
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tasks), *map(str, models)],
        env={**os.environ, **offline, "TQDM_DISABLE": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


def _likelihoods_of_texts_are_ours(trained: Trained, results: dict[str, Any], samples: list[dict[str, Any]]) -> None:
    samples = sorted(samples, key=lambda sample: int(sample["doc_id"]))
    ours = [_rolling(trained, _ids(trained, text)) for text in TEXTS]
    theirs = [float(sample["filtered_resps"][0]) for sample in samples]
    assert theirs == pytest.approx(ours, rel=2e-5)
    assert len(_ids(trained, TEXTS[1])) > 3 * ROW_TOKENS  # windows are really needed
    words, spelled = sum(len(text.split()) for text in TEXTS), sum(len(text.encode()) for text in TEXTS)
    assert results["word_perplexity,none"] == pytest.approx(math.exp(-sum(ours) / words), rel=1e-4)
    assert results["byte_perplexity,none"] == pytest.approx(math.exp(-sum(ours) / spelled), rel=1e-5)
    assert results["bits_per_byte,none"] == pytest.approx(-sum(ours) / spelled / math.log(2), rel=1e-5)


def _choices_are_ours(trained: Trained, results: dict[str, Any], samples: list[dict[str, Any]]) -> None:
    samples, right = sorted(samples, key=lambda sample: int(sample["doc_id"])), 0
    for question, sample in zip(QUESTIONS, samples, strict=True):
        context = _ids(trained, str(question["question"]))
        ours = []
        for choice in question["choices"]:  # type: ignore[attr-defined]
            ids = _ids(trained, f"{question['question']} {choice}")
            ours.append(_log_likelihood(trained, ids, len(context)))
        assert [float(response[0]) for response in sample["filtered_resps"]] == pytest.approx(ours, rel=2e-5)
        right += ours.index(max(ours)) == question["answer"]
    assert 0 < right < len(QUESTIONS)  # else an accuracy could be right by chance
    assert results["acc,none"] == right / len(QUESTIONS)


def _ids(trained: Trained, text: str) -> list[int]:
    ids: list[int] = trained.tokenizer.encode_batch([text])[0].tolist()
    return ids


def _rolling(trained: Trained, ids: list[int]) -> float:
    """Each token after those of its window, the last of which reaches back; a text begins behind the end of another."""
    stream, total = [trained.tokenizer.eos_id, *ids], 0.0
    for first in range(0, len(ids), ROW_TOKENS):
        last = min(first + ROW_TOKENS, len(ids))
        window = stream[max(0, last - ROW_TOKENS) : last + 1]
        total += _log_likelihood(trained, window, len(window) - (last - first))
    return total


def _log_likelihood(trained: Trained, ids: list[int], context: int) -> float:
    """Of the ids behind the first `context`, from one forward pass over all."""
    info = SeqInfo.from_lengths([len(ids)])
    nothing = torch.full((len(ids),), IGNORED_LABEL)
    batch = Batch(0, torch.tensor(ids), info, nothing, None, None, 0, 0, 0, 0)
    with torch.inference_mode():
        scores_TV = torch.log_softmax(trained.model.logits(batch).double(), -1)
    return math.fsum(float(scores_TV[place - 1, ids[place]]) for place in range(context, len(ids)))
