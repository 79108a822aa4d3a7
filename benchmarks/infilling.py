"""What the objectives teach: gaps filled after fill-in-the-middle, prefix LM, span corruption, UL2 and causal LM.

A toy language: four digits, a letter twice, three digits, the letter in capitals three times (4817kk395KKK). The
small letters are known from the capitals, which stand BEHIND them: a causal model, asked with what stands before the
gap, can only guess one of 26, and who reads both sides can know them. The capitals are known from what stands
before them: there the causal model is as able, and a prefix LM is also asked with its prompt seen in one direction,
which it was not trained for. All models have the same width, steps, rows and seed, go the whole way (tokenizer,
`data build`, `pretrain train`, the newest checkpoint) and answer greedily. The texts that are asked are not among
those trained on, by their hashes (200, of --quick 50). Values are the share of hidden letters in their place.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_lowercase, digits
from typing import Any

from benchmarks.result import Result
from benchmarks.tiny_run import environment_of

GAP = "_"
SHORTEST = ("fill_in_the_middle", "span_corruption", "ul2")  # who leaves short documents out, or as they are
SENTINELS, VOCABULARY = 32, 256 + 9 + 32
MODEL = {"vocabulary_size": VOCABULARY, "width": 64, "num_heads": 4, "feed_forward_width": 192}
DECODER = {**MODEL, "family": "decoder", "num_layers": 2, "qk_norm": True}
ENCODER_DECODER = {**MODEL, "family": "t5", "num_encoder_layers": 2, "num_decoder_layers": 2}


@dataclass(frozen=True, slots=True)
class Size:
    """How much is trained and asked."""

    texts: int = 40_000
    steps: int = 500
    asked: int = 200


@dataclass(frozen=True, slots=True)
class Asked:
    """A question about a document.

    Attributes:
        options: further fields of a `Question`.
        hidden: [first, end) of the letters that must be written.
    """

    metric: str
    run: str
    hidden: tuple[int, int]
    options: dict[str, Any]


LETTERS, WIDER, END = (4, 6), (2, 8), (9, 12)
PARTS = {
    "decoders": (
        Asked("fim_accuracy", "fill_in_the_middle", LETTERS, {"suffix": ""}),
        Asked("fim_wide_accuracy", "fill_in_the_middle", WIDER, {"suffix": ""}),
        Asked("span_corruption_accuracy", "span_corruption", LETTERS, {"gap": GAP}),
        Asked("ul2_r_accuracy", "ul2", LETTERS, {"gap": GAP, "mode": "R"}),
        Asked("ul2_x_accuracy", "ul2", WIDER, {"gap": GAP, "mode": "X"}),
        Asked("ul2_s_accuracy", "ul2", END, {"mode": "S"}),
        Asked("prefix_lm_accuracy", "prefix_lm", END, {}),
    ),
    "encoder_decoder": (
        Asked("t5_span_corruption_accuracy", "span_corruption", LETTERS, {"gap": GAP}),
        Asked("t5_ul2_r_accuracy", "ul2", LETTERS, {"gap": GAP, "mode": "R"}),
        Asked("t5_ul2_x_accuracy", "ul2", WIDER, {"gap": GAP, "mode": "X"}),
        Asked("t5_ul2_s_accuracy", "ul2", END, {"mode": "S"}),
    ),
}


def make_texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        noise, letter = "".join(rng.choices(digits, k=7)), rng.choice(ascii_lowercase)
        made.append(f"{noise[:4]}{2 * letter}{noise[4:]}{3 * letter.upper()}")
    return made


def held_out(trained: Sequence[str], count: int) -> list[str]:
    """Texts whose hashes are none of those trained on."""
    known = {_hash(text) for text in trained}
    return [text for text in make_texts(2 * count, seed=1) if _hash(text) not in known][:count]


def share_right(written: Sequence[str], expected: Sequence[str]) -> float:
    """Letters in their place, of all that are expected; digits are noise."""
    places = [(i, n) for i, text in enumerate(expected) for n, character in enumerate(text) if character.isalpha()]
    return sum(written[i][n : n + 1] == expected[i][n] for i, n in places) / len(places)


def measure(*, quick: bool, command: str) -> list[Result]:
    """All parts."""
    return [result for part in PARTS for result in measure_part(part, quick=quick, command=command)]


def measure_part(part: str, *, quick: bool, command: str) -> list[Result]:
    """Trains the runs of a part and asks them; the causal decoder is trained for both."""
    size = Size(texts=10_000, steps=300, asked=50) if quick else Size()
    with tempfile.TemporaryDirectory() as folder:
        return measure_in(Path(folder), part, size, command)


def measure_in(folder: Path, part: str, size: Size, command: str) -> list[Result]:
    """The same in a folder, where the runs stay."""
    from launch.trained import open_trained

    trained_on = make_texts(size.texts, seed=0)
    asked = held_out(trained_on, size.asked)
    _build(folder, trained_on)
    model = DECODER if part == "decoders" else ENCODER_DECODER
    runs = {
        name: open_trained(str(train(folder, name, size, DECODER if name == "causal_lm" else model)))
        for name in ("causal_lm", *dict.fromkeys(question.run for question in PARTS[part]))
    }
    baselines = {hidden: _causal_accuracy(runs["causal_lm"].writer, asked, hidden) for hidden in (LETTERS, WIDER, END)}
    results = [
        Result(
            f"infilling.{question.metric}", _accuracy(runs[question.run].writer, asked, question), "fraction",
            "a causal decoder", baselines[question.hidden], 1, command,
        )
        for question in PARTS[part]
    ]  # fmt: skip
    if part == "decoders":
        writer = runs["prefix_lm"].writer
        value = _causal_accuracy(replace(writer, objective=None), asked, END)
        results.append(
            Result(
                "infilling.prefix_lm_asked_causally", value, "fraction",
                "the same weights asked as they were trained", _causal_accuracy(writer, asked, END), 1, command,
            )
        )  # fmt: skip
    return results


def _accuracy(writer: Any, texts: Sequence[str], asked: Asked) -> float:
    """Of the answers of a run that was trained to be asked so."""
    from pretrain.generate.prompts import Question
    from pretrain.generate.text import write_texts

    first, end = asked.hidden
    questions, expected = [], []
    for text in texts:
        expected.append(text[first:end])
        if "gap" in asked.options:
            questions.append(Question(text[:first] + GAP + text[end:], **asked.options))
        elif "suffix" in asked.options:
            questions.append(Question(text[:first], suffix=text[end:]))
        else:
            questions.append(Question(text[:first], **asked.options))
    written = write_texts(writer, questions, max_tokens=16)
    return share_right([(one.gaps[0] or "") if one.gaps else one.text for one in written], expected)


def _causal_accuracy(writer: Any, texts: Sequence[str], hidden: tuple[int, int]) -> float:
    """Of a decoder that continues what stands before the gap."""
    from pretrain.generate.text import write_texts

    first, end = hidden
    written = write_texts(writer, [text[:first] for text in texts], max_tokens=end - first)
    return share_right([one.text for one in written], [text[first:end] for text in texts])


def _build(folder: Path, texts: Sequence[str]) -> None:
    """Tokenizer of bytes and special tokens, and shards."""
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = ["--fill-in-the-middle", "--modes", "--sentinels", str(SENTINELS)]
    made = ["--vocabulary-size", str(VOCABULARY), "--out", "tokenizer.json"]
    _pretrain(folder, "tokenizer", "train", "text.jsonl", *options, *made)
    blocks = ["--block-tokens", "1024", "--workers", "1"]
    _pretrain(folder, "data", "build", "text.jsonl", "--tokenizer", "tokenizer.json", "--out", "text", *blocks)


def train(folder: Path, objective: str, size: Size, model: dict[str, Any]) -> Path:
    """Trains a run of an objective; its directory."""
    name = f"{model['family']}-{objective}"
    config = {
        "name": name, "seed": 1, "tokenizer": "tokenizer.json",
        "data": {"sources": {"text": {"path": "text"}}},
        "objective": {"kind": objective, **({"min_document_tokens": 8} if objective in SHORTEST else {})},
        "model": model,
        "batch": {"global_batch_size": 8, "micro_batch_size": 8, "sequence_length": 128},
        "optimizer": {"kind": "adamw", "learning_rate": 4e-3},
        "schedule": {"kind": "cosine", "total_steps": size.steps, "warmup_steps": size.steps // 10},
        "engine": {"zero_stage": 1, "precision": "fp32"},
        "checkpoint": {"every_steps": size.steps},
        "cluster": {"num_ranks": 1, "standbys": False},
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(json.dumps(config))
    _pretrain(folder, "train", f"{name}.yaml")
    return folder / name


def _pretrain(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "launch.cli", *words]
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    environment = {**os.environ, **environment_of(folder), **threads}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {result.returncode}: {result.stderr[-2000:]}")


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
