"""T5, BERT and a Llama-like model trained by us, and on the same rows by plain torch on `transformers`: their losses.

Ours is `pretrain train` with two ranks at ZeRO-2. Theirs starts from the same weights (exported before the first
step), reads the documents of every step one to a row and padded, as people do who have no packing, and is updated by
torch's AdamW with torch's clipping; only the rows of a step and its rate are taken from ours. T5 (span corruption) and
BERT (masked tokens) learn prose, the Llama-like model code: see `benchmarks.build` for the texts. Losses are nats
per target of every step. Two trainings that compute the same differ by rounding only, which grows with the steps; a
different one differs from the first steps on. `runs/benchmarks/follow` keeps the losses of each (`t5.log.jsonl` …) and
a picture of all, `losses.png`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from benchmarks.build import texts_of
from benchmarks.curves import Curve, Panel, draw
from benchmarks.result import Result
from pretrain.config.load import load_config
from pretrain.config.schema import RunConfig
from pretrain.data.loader import open_loader
from pretrain.data.tokenizer import Tokenizer
from pretrain.model.hf.directory import export_model
from pretrain.model.hf.family import ExportOptions
from pretrain.model.registry import build_model
from pretrain.sequence import IGNORED_LABEL, Batch
from pretrain.topology import World

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("runs/benchmarks/follow")
VOCABULARY, LENGTH, ROWS = 4096, 256, 16
TOKENS_AT_ONCE = 4096  # of a padded batch of theirs
STEPS, QUICK_STEPS = 150, 8
BYTES = 8 * 10**6
EARLY = 20
ENDS = 50  # last steps that the means are of


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its task and its text.

    Attributes:
        peer: class of transformers.
    """

    title: str
    text: str
    peer: str
    objective: dict[str, Any]
    model: dict[str, Any]
    batch: dict[str, Any]


SIZES = {"width": 128, "num_heads": 4, "feed_forward_width": 512, "vocabulary_size": VOCABULARY}
BATCH = {"global_batch_size": ROWS, "micro_batch_size": 4, "sequence_length": LENGTH}
CASES = {
    "t5": Case(
        "T5 on prose, span corruption", "prose", "T5ForConditionalGeneration", {"kind": "span_corruption"},
        {**SIZES, "family": "t5", "num_encoder_layers": 2, "num_decoder_layers": 2, "tied_embeddings": False}, {},
    ),
    "bert": Case(
        "BERT on prose, masked tokens", "prose", "BertForMaskedLM", {"kind": "masked_lm"},
        {**SIZES, "family": "encoder", "num_layers": 3, "max_length": LENGTH}, {},
    ),
    "llama": Case(
        "Llama-like on code, next tokens", "code", "LlamaForCausalLM", {"kind": "causal_lm"},
        {**SIZES, "family": "decoder", "num_layers": 3, "num_kv_heads": 2}, {},
    ),
}  # fmt: skip


def _pretrain(folder: Path, *words: str) -> None:
    known = {"PRETRAIN_HOME": str(folder / "runs"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "launch.cli", *words]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **known}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-3000:]}")


def prepare(folder: Path) -> None:
    """A tokenizer of both kinds of text, and shards of each; what exists is not made again."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in ("prose", "code"):
        path = folder / f"{kind}.jsonl"
        if not path.exists():
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts_of(kind, BYTES)))
    if not (folder / "tokenizer.json").exists():
        options = ["--vocabulary-size", str(VOCABULARY - 1), "--sentinels", "100", "--out", "tokenizer.json"]
        _pretrain(folder, "tokenizer", "train", "prose.jsonl", "code.jsonl", *options)
    for kind in ("prose", "code"):
        if not (folder / kind).exists():
            _pretrain(folder, "data", "build", f"{kind}.jsonl", "--tokenizer", "tokenizer.json", "--out", kind)


def config_of(folder: Path, name: str, steps: int) -> RunConfig:
    """Written to NAME.yaml, and read back as `pretrain train` reads it."""
    case = CASES[name]
    body = {
        "name": name, "seed": 1, "tokenizer": str(folder / "tokenizer.json"),
        "data": {"sources": {case.text: {"path": str(folder / case.text)}}},
        "objective": case.objective, "model": case.model, "batch": {**BATCH, **case.batch},
        "optimizer": {"kind": "adamw", "learning_rate": 1e-3},
        "schedule": {"kind": "cosine", "total_steps": steps, "warmup_steps": max(1, steps // 10)},
        "engine": {"zero_stage": 2, "precision": "fp32"}, "checkpoint": {"every_steps": steps},
        "metrics": {"log_every_steps": 1}, "cluster": {"num_ranks": 2},
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(body, sort_keys=False))
    return load_config(path)


# ---------------------------------------------------------------------------------------------- ours


def train_ours(folder: Path, name: str) -> list[dict[str, float]]:
    """Records of all steps."""
    shutil.rmtree(folder / "runs" / name, ignore_errors=True)
    _pretrain(folder, "train", f"{name}.yaml")
    lines = (folder / "runs" / name / "metrics" / "attempt-001.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "objective" in record]


# -------------------------------------------------------------------------------------------- theirs


def steps_of(config: RunConfig, tokenizer: Tokenizer) -> Iterator[tuple[list[Batch], str]]:
    """The micro-batches of each step and the digest of their rows."""
    with open_loader(config, tokenizer.byte_lengths(), World()) as loader:
        state = loader.initial_state()
        for step in range(config.schedule.total_steps):
            data = loader.read(step, state)
            yield list(data.batches), f"{data.digest:012x}"
            state = loader.next_state(state)


def documents(batches: list[Batch]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of a step: (what the encoder reads or else the decoder, what the decoder reads, labels) of each document."""
    found = []
    for batch in batches:
        lengths = list(batch.decoder_info.lengths)
        read = batch.decoder_ids.split(lengths)
        given = read
        if batch.encoder_ids is not None:
            assert batch.encoder_info is not None
            given = batch.encoder_ids.split(list(batch.encoder_info.lengths))
        whole = zip(given, read, batch.labels.split(lengths), strict=True)
        found += [document for document in whole if bool((document[2] != IGNORED_LABEL).any())]
    return sorted(found, key=lambda one: len(one[0]))


def padded(some: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], pad: int) -> dict[str, torch.Tensor]:
    """Inputs of transformers and, under `labels`, the target of each place."""
    fill = torch.nn.utils.rnn.pad_sequence
    given, read, labels = zip(*some, strict=True)
    inputs = {
        "input_ids": fill(list(given), batch_first=True, padding_value=pad),
        "attention_mask": fill([torch.ones_like(ids) for ids in given], batch_first=True),
        "labels": fill(list(labels), batch_first=True, padding_value=IGNORED_LABEL),
    }
    if given is not read and given[0] is not read[0]:
        inputs["decoder_input_ids"] = fill(list(read), batch_first=True, padding_value=pad)
    return inputs


def grouped(found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> Iterator[list[Any]]:
    """Documents of about the same length, so many that their padded ids are at most TOKENS_AT_ONCE."""
    group: list[Any] = []
    for document in found:
        if group and (len(group) + 1) * max(len(document[0]), len(document[1])) > TOKENS_AT_ONCE:
            yield group
            group = []
        group.append(document)
    yield group


def train_theirs(folder: Path, name: str, config: RunConfig, records: list[dict[str, Any]]) -> list[float]:
    """The loss of every step.

    Raises:
        RuntimeError: the rows are not those that ours was trained on.
    """
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    first = folder / f"{name}-first"
    shutil.rmtree(first, ignore_errors=True)
    start = build_model(config.model, config.loss, seed=config.seed, activation_checkpointing=False)
    weights = {key: value.detach() for key, value in start.named_parameters()}
    ids = {"eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id, "start_id": tokenizer.start_id}
    export_model(weights, config.model, first, ExportOptions(LENGTH, **ids))
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = getattr(transformers, CASES[name].peer).from_pretrained(first).train()
    for key, parameter in model.named_parameters():
        if "token_type_embeddings" in key:  # a vector that is added everywhere; ours has none, and it would learn too
            parameter.requires_grad_(False)
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim >= 2) == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for record, (batches, digest) in zip(records, steps_of(config, tokenizer), strict=True):
        if record["data_digest"] != digest:
            raise RuntimeError(f"step {record['step']}: digest {digest}, ours was {record['data_digest']}")
        targets = sum(batch.target_tokens for batch in batches)
        total = 0.0
        for group in grouped(documents(batches)):
            inputs = padded(group, tokenizer.pad_id)
            labels = inputs.pop("labels")
            logits = model(**inputs, use_cache=False).logits if name != "bert" else model(**inputs).logits
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
            )
            (loss / targets).backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for param_group in optimizer.param_groups:
            param_group["lr"] = record["learning_rate"]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total / targets)
    return losses


# ------------------------------------------------------------------------------------------- results


PARTS = {name: case.title for name, case in CASES.items()}


def measure(*, quick: bool, command: str) -> list[Result]:
    """Largest differences of the losses, early and over the whole run, and the mean of the last steps on both sides."""
    return [result for name in PARTS for result in measure_part(name, quick=quick, command=command)]


def measure_part(part: str, *, quick: bool, command: str) -> list[Result]:
    """One of the models; the picture has all that were measured here before."""
    folder = FOLDER.absolute()
    prepare(folder)
    config = config_of(folder, part, QUICK_STEPS if quick else STEPS)
    records = train_ours(folder, part)
    theirs = train_theirs(folder, part, config, records)
    lines = [
        {"run": part, "step": record["step"], "ours": record["loss"], "theirs": round(their, 6)}
        for record, their in zip(records, theirs, strict=True)
    ]
    (folder / f"{part}.log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _draw(folder)
    apart = [abs(line["ours"] - line["theirs"]) for line in lines]
    last = lines[-ENDS:]
    ends = [sum(line[side] for line in last) / len(last) for side in ("ours", "theirs")]
    peer = f"transformers' {CASES[part].peer}, loss of the last {len(last)} steps"
    return [
        Result(f"follow.{part}_loss", ends[0], "nats/token", peer, ends[1], 1, command),
        Result(f"follow.{part}_apart_early", max(apart[:EARLY]), "nats/token", "largest, first 20 steps", None, 1,
               command),
        Result(f"follow.{part}_apart", max(apart), "nats/token", "largest, all steps", None, 1, command),
    ]  # fmt: skip


def _draw(folder: Path) -> None:
    panels = []
    for name, case in CASES.items():
        path = folder / f"{name}.log.jsonl"
        if not path.exists():
            continue
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        steps = [line["step"] for line in lines]
        curves = [Curve("ours", "pretrain, 2 ranks, ZeRO-2", steps, [line["ours"] for line in lines]),
                  Curve("theirs", f"transformers' {case.peer}", steps, [line["theirs"] for line in lines])]  # fmt: skip
        panels.append(Panel(case.title, "step", "nats per target token", curves))
    draw(folder / "losses.png", "The same weights, rows and rates: training losses", panels)
