"""Translation: the paper's architecture, small, trained by us and by `transformers` for the same time; their BLEU.

English to German. Both sides have the same pairs, tokenizer, sizes, dropout, rate and schedule, label smoothing,
pairs in an update (on average), wall time of training from the end of the first step, and seeds. Ours is
`pretrain train configs/translation-small.yaml`: two ranks at ZeRO-2, packed rows (no standbys, whose start would take
both cores for half a minute). Theirs is Marian under Seq2SeqTrainer with length grouping, as two ranks or as one
process with two threads, whichever is faster. Then each translates what was held out: ours by `pretrain evaluate`
(4 beams, the paper's penalty 0.6); theirs by its own `generate` (4 beams) and by ours, the better of both counts.
Scores are sacrebleu's.

Pairs are the sentences (all but the dictionary) of `en-de.train.jsonl.gz` and `en-de.test.jsonl.gz` in the folder
PRETRAIN_CORPORA, or what `make quickstart-translation` finds on the machine. That nothing held out is among what
was trained on is checked by hash. Everything is kept in runs/benchmarks/translate: finished trainings are not
done again, `log.jsonl` has the losses of both sides, `losses.png` draws them. Needs PRETRAIN_CORPORA or
pretrain[translation].
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.curves import Curve, Panel, draw
from benchmarks.marian_peer import LOG_EVERY, Spec
from benchmarks.result import Result, median
from launch.catalogues import catalogue_files, translated_messages
from pretrain.config.load import load_config
from pretrain.data.format import read_manifest
from pretrain.data.selection import is_validation
from pretrain.data.tokenizer import Tokenizer
from pretrain.generate.scores import translation_scores
from pretrain.rundir import RunDirectory
from pretrain.store import open_store

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs/translation-small.yaml"
FOLDER = Path("runs/benchmarks/translate")
SEEDS, SECONDS = (1, 2, 3), 1080.0
ROWS, WARMUP = 4, 400  # of an update; a short training needs many
LONGEST = 250  # tokens of a side; rows have 256
TRIAL_STEPS = 40
FIELDS = ["--source-field", "source", "--target-field", "target"]
HELD_OUT = 0.02  # of the machine's own catalogues


@dataclass(frozen=True, slots=True)
class Side:
    """What one training gave: BLEU and chrF, held-out loss in nats per target token, steps, seconds, its log."""

    bleu: float
    chrf: float
    loss: float
    steps: int
    seconds: float
    log: list[dict[str, float]]


# ---------------------------------------------------------------------------------------------- data


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.strip().encode()).digest()


def _corpus(name: str) -> Iterator[tuple[str, str]]:
    folder = os.environ.get("PRETRAIN_CORPORA")
    if folder:
        with gzip.open(Path(folder, f"en-de.{name}.jsonl.gz"), "rt", encoding="utf-8") as file:
            for record in map(json.loads, file):
                if record["source"] != "ding":
                    yield record["en"].strip(), record["de"].strip()
        return
    paths = sysconfig.get_paths()
    folders = [*sorted({Path(paths["purelib"]), Path(paths["platlib"])}), Path("/usr/share/locale")]
    pairs, _ = translated_messages(catalogue_files("de", folders))
    for source, target in pairs:
        if is_validation(source.encode(), HELD_OUT) == (name == "test"):
            yield source.strip(), target.strip()


def prepare(folder: Path) -> None:
    """Pairs, tokenizer and shards, whichever is missing.

    Raises:
        RuntimeError: a held-out sentence is among what is trained on, or a command failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokenizer.json").exists():
        pairs = {name: list(dict.fromkeys(_corpus(name))) for name in ("train", "test")}
        seen = {_digest(source) for source, _ in pairs["train"]}
        if leaked := [source for source, _ in pairs["test"] if _digest(source) in seen]:
            raise RuntimeError(f"{len(leaked)} held-out sentences are trained on, the first is {leaked[0]!r}")
        for name, some in pairs.items():
            _write_pairs(folder / f"all-{name}.jsonl", some)
        _pretrain(folder, "tokenizer", "train", "all-train.jsonl", *FIELDS, "--vocabulary-size", "4096",
                  "--out", "tokenizer.json")  # fmt: skip
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    for name in ("train", "test"):
        if not (folder / f"{name}.jsonl").exists():
            some = _read_pairs(folder / f"all-{name}.jsonl")
            lengths = [[len(ids) for ids in tokenizer.encode_batch(list(side))] for side in zip(*some, strict=True)]
            kept = [p for p, *sizes in zip(some, *lengths, strict=True) if max(sizes) <= LONGEST]
            _write_pairs(folder / f"{name}.jsonl", kept)
        if not (folder / "data" / name).exists():
            _pretrain(folder, "data", "build", f"{name}.jsonl", *FIELDS, "--tokenizer", "tokenizer.json", "--out",
                      f"data/{name}", "--source-length", "256", "--target-length", "256", "--rows-per-block", "16",
                      "--keep-duplicates")  # fmt: skip


def _write_pairs(path: Path, pairs: list[tuple[str, str]]) -> None:
    lines = (json.dumps({"source": a, "target": b}, ensure_ascii=False) + "\n" for a, b in pairs)
    path.write_text("".join(lines), encoding="utf-8")


def _read_pairs(path: Path) -> list[tuple[str, str]]:
    records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [(record["source"], record["target"]) for record in records]


# ---------------------------------------------------------------------------------------------- ours


def _environment(folder: Path, threads: int) -> dict[str, str]:
    known = {"PRETRAIN_HOME": str(folder / "runs"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
    return {**os.environ, **known, "TOKENIZERS_PARALLELISM": "false"}


def _run(folder: Path, command: list[str], threads: int = 1) -> str:
    with subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=_environment(folder, threads), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # also the ranks of a launcher
            raise
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {err[-3000:]}")
    return out


def _pretrain(folder: Path, *words: str) -> str:
    return _run(folder, ["-m", "launch.cli", *words])


def _records(folder: Path, name: str) -> list[dict[str, Any]]:
    found = sorted((folder / "runs" / name / "metrics").glob("attempt-*.jsonl"))
    lines = [line for path in found for line in path.read_text().rsplit("\n", 1)[0].splitlines()]
    return [record for record in map(json.loads, lines) if "objective" in record]


def train_ours(folder: Path, seed: int, seconds: float) -> None:
    """Trains until the time is over, then asks the run to save and end.

    Raises:
        RuntimeError: the run ended by itself.
    """
    name = f"ours-{seed}"
    words = [
        "train", str(CONFIG), "--name", name, f"seed={seed}", "tokenizer=tokenizer.json",
        "data.sources.messages.path=data/train", "data.validation.messages.path=data/test",
        "schedule.total_steps=1000000", f"schedule.warmup_steps={WARMUP}", f"batch.global_batch_size={ROWS}",
        f"batch.micro_batch_size={ROWS // 2}",
        "checkpoint.every_steps=1000000", "eval.every_steps=1000000", "metrics.log_every_steps=1",
        "cluster.standbys=off",
    ]  # fmt: skip
    with (folder / f"{name}.out").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.cli", *words], cwd=folder, env=_environment(folder, 1), stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None:
                records = _records(folder, name)
                # What asking takes is left off; the seconds that were trained are in the log.
                if records and records[-1]["t"] - records[0]["t"] >= seconds - 0.5:
                    break
                time.sleep(0.25)
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended: {(folder / f'{name}.out').read_text()[-3000:]}")
            RunDirectory.locate(str(folder / "runs" / name)).request_stop()
            process.wait(60)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)


def ours(folder: Path, seed: int, seconds: float) -> Side:
    """Trains, translates and scores."""
    train_ours(folder, seed, seconds)
    found = _evaluate(folder, f"ours-{seed}", f"ours-{seed}.translations.jsonl", [])
    records = _records(folder, f"ours-{seed}")
    start = records[0]["t"]
    log = [{"step": r["step"], "seconds": r["t"] - start, "objective": r["objective"]} for r in records]
    return Side(*found, int(log[-1]["step"]), log[-1]["seconds"], _thinned(log))


def _thinned(log: list[dict[str, float]]) -> list[dict[str, float]]:
    """Means over as many steps as theirs are logged by."""
    groups = [log[first : first + LOG_EVERY] for first in range(0, len(log), LOG_EVERY)]
    return [{**g[-1], "objective": sum(line["objective"] for line in g) / len(g)} for g in groups]


def _evaluate(folder: Path, target: str, samples: str, data: list[str]) -> tuple[float, float, float]:
    pairs = ["--pairs", "test.jsonl", "--beams", "4", "--samples", samples]
    body = json.loads(_pretrain(folder, "evaluate", target, *data, *pairs, "--max-rows", "100000", "--json"))
    scores, losses = body["translation"], body["validation"]["messages"]
    return scores["bleu"], scores["chrf"], losses["loss"]


# -------------------------------------------------------------------------------------------- theirs


def spec_of(folder: Path, seed: int, *, seconds: float | None, steps: int) -> Spec:
    """The same training for the peer."""
    config = load_config(CONFIG, check_files=False)
    model, optimizer = config.model, config.optimizer
    manifest, tokenizer = (
        read_manifest(open_store(str(folder / "data/train"))),
        Tokenizer.load(folder / "tokenizer.json"),
    )
    num_pairs = len(_read_pairs(folder / "train.jsonl"))
    slots = (manifest.tokens + manifest.source_tokens) / manifest.fill_fraction
    rows = slots / (manifest.source_capacity + manifest.target_capacity)
    sizes: dict[str, Any] = {"vocab_size": model.vocabulary_size, "d_model": model.width, "dropout": model.dropout}
    for side, layers in (("encoder", model.num_encoder_layers), ("decoder", model.num_decoder_layers)):
        sizes |= {f"{side}_layers": layers, f"{side}_attention_heads": model.num_heads}
        sizes |= {f"{side}_ffn_dim": model.feed_forward_width}
    return Spec(
        pairs="train.jsonl", held_out="test.jsonl", tokenizer="tokenizer.json", out=f"theirs-{seed}", seed=seed,
        pairs_per_step=round(ROWS * num_pairs / rows / 2) * 2, seconds=seconds, steps=steps,
        start_id=tokenizer.start_id, pad_id=tokenizer.pad_id, end_id=tokenizer.eos_id,
        model=sizes | {"activation_function": "relu", "scale_embedding": True, "max_position_embeddings": 512},
        optimizer={
            "learning_rate": optimizer.learning_rate, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.98,
            "adam_epsilon": 1e-9, "max_grad_norm": 1.0, "warmup_steps": WARMUP, "label_smoothing_factor": 0.1,
        },
    )  # fmt: skip


def _peer(folder: Path, action: str, spec: Spec, *, ranks: int) -> None:
    path = folder / f"{spec.out}.json"
    path.write_text(spec.to_json())
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    _run(folder, [*launcher, "-m", "benchmarks.marian_peer", action, path.name], threads=2 // ranks)


def best_ranks(folder: Path) -> int:
    """1 or 2, whichever trains faster."""

    def rate(ranks: int) -> float:
        spec = spec_of(folder, 0, seconds=None, steps=TRIAL_STEPS)
        _peer(folder, "train", spec, ranks=ranks)
        lines = [json.loads(line) for line in (folder / spec.out / "log.jsonl").read_text().splitlines()]
        return (TRIAL_STEPS - 1) / float(lines[-1]["seconds"])

    return max((1, 2), key=rate)


def theirs(folder: Path, seed: int, seconds: float, ranks: int) -> Side:
    """Trains, translates in two ways and scores; the better translations count."""
    spec = spec_of(folder, seed, seconds=seconds, steps=1_000_000)
    _peer(folder, "train", spec, ranks=ranks)
    _peer(folder, "write", spec, ranks=1)
    out = folder / spec.out
    (out / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    by_ours = _evaluate(folder, spec.out, f"{spec.out}.translations.jsonl", ["--data", "messages=data/test"])
    written = [json.loads(line) for line in (out / "written.jsonl").read_text().splitlines()]
    own = translation_scores([one["hypothesis"] for one in written], [one["reference"] for one in written])
    bleu, chrf = max(by_ours[:2], (own.bleu, own.chrf))
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return Side(bleu, chrf, by_ours[2], int(log[-1]["step"]), log[-1]["seconds"], [x for x in log if "objective" in x])


# ------------------------------------------------------------------------------------------- results


def _kept(path: Path, make: Callable[[], Side]) -> Side:
    """What was measured before, or now."""
    if path.exists():
        return Side(**json.loads(path.read_text()))
    side = make()
    path.write_text(json.dumps({name: getattr(side, name) for name in Side.__slots__}))
    return side


def measure(*, quick: bool, command: str) -> list[Result]:
    """BLEU of both sides over the seeds."""
    seeds, seconds = (SEEDS[:1], 20.0) if quick else (SEEDS, SECONDS)
    folder = (FOLDER.parent / "translate-quick" if quick else FOLDER).absolute()
    prepare(folder)
    ranks_file = folder / "ranks"
    if not ranks_file.exists():
        ranks_file.write_text(str(best_ranks(folder)))
    ranks = int(ranks_file.read_text())
    found: dict[str, list[Side]] = {"ours": [], "theirs": []}
    for seed in seeds:
        found["ours"].append(_kept(folder / f"ours-{seed}.side.json", lambda s=seed: ours(folder, s, seconds)))
        found["theirs"].append(
            _kept(folder / f"theirs-{seed}.side.json", lambda s=seed: theirs(folder, s, seconds, ranks))
        )
    _keep_logs(folder, found, seeds)
    peer = f"Marian under Seq2SeqTrainer, {ranks} rank(s), length-grouped"
    values = {(side, name): median([getattr(one, name) for one in some]) for side, some in found.items()
              for name in ("bleu", "chrf", "loss", "steps")}  # fmt: skip
    ratio = median([a.bleu / max(b.bleu, 1e-9) for a, b in zip(found["ours"], found["theirs"], strict=True)])
    n = len(seeds)
    return [
        Result("translate.bleu", values["ours", "bleu"], "BLEU", peer, values["theirs", "bleu"], n, command),
        Result("translate.bleu_vs_marian", ratio, "ratio", "median over the seeds", None, n, command),
        Result("translate.chrf", values["ours", "chrf"], "chrF", peer, values["theirs", "chrf"], n, command),
        Result("translate.loss", values["ours", "loss"], "nats/token", peer, values["theirs", "loss"], n, command),
        Result("translate.steps", values["ours", "steps"], "steps", peer, values["theirs", "steps"], n, command),
    ]


def _keep_logs(folder: Path, found: dict[str, list[Side]], seeds: tuple[int, ...]) -> None:
    lines = [
        json.dumps({"side": side, "seed": seed, **{name: round(value, 4) for name, value in line.items()}}) + "\n"
        for side, some in found.items()
        for seed, one in zip(seeds, some, strict=True)
        for line in one.log
    ]
    (folder / "log.jsonl").write_text("".join(lines))

    def panel(field: str, label: str) -> Panel:
        curves = [
            Curve(side, {"ours": "pretrain", "theirs": "transformers' Marian"}[side], [line[field] for line in one.log],
                  [line["objective"] for line in one.log])
            for side, some in found.items() for one in some
        ]  # fmt: skip
        return Panel("training, label smoothing 0.1", label, "nats per target token", curves)

    title = "English to German, the same pairs, sizes and time, each seed a line"
    draw(folder / "losses.png", title, [panel("seconds", "seconds of training"), panel("step", "steps")])
