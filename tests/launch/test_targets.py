"""`pretrain generate` and `evaluate` on every kind of target: the same weights, the same texts and losses."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from launch import cli
from launch.trained import open_trained
from pretrain.checkpoint import list_checkpoints
from pretrain.data.blocks import BlockReader, TokenBlock
from pretrain.data.format import read_manifest
from pretrain.data.tokenizer import Tokenizer
from pretrain.rundir import RunDirectory
from pretrain.sequence import IGNORED_LABEL, Batch, SeqInfo
from pretrain.store import open_store
from tests.ranks import run_ranks
from tests.tiny import build_tiny
from tests.train.rank_programs import trainings

LINES = ["the cat sees", "a red dog", "then the small tree and the house"]


class Command:
    """The command, with JSON."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder, self._capsys = folder, capsys

    def __call__(self, target: object, *options: object, lines: list[str] = LINES) -> list[dict[str, Any]]:
        """What is told of each line, without where the weights are from."""
        source = self._folder / "lines.txt"
        source.write_text("\n".join(lines) + "\n")
        self._capsys.readouterr()
        words = ["generate", str(target), "--file", str(source), "--lines", "--json", "--max-tokens", "12"]
        assert cli.main([*words, *map(str, options)]) == 0
        rows: list[dict[str, Any]] = json.loads(self._capsys.readouterr().out)
        return [{name: row[name] for name in row if name not in ("run", "checkpoint")} for row in rows]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the run `small` of two checkpoints, its newest exported, and the mean of both."""
    folder = tmp_path_factory.mktemp("generate")
    run = build_tiny(folder).decoder(
        "name=small", "schedule.total_steps=40", "checkpoint.every_steps=20", "optimizer.learning_rate=2e-2"
    )
    (trained,) = run_ranks(trainings, ranks=1, arguments={"runs": [run], "home": str(folder)}, timeout_s=120)
    assert trained.value == [0], trained.output[-3000:]
    small = str(folder / "small")
    assert cli.main(["checkpoint", "export", small, "--out", str(folder / "hf")]) == 0
    assert cli.main(["checkpoint", "average", small, "--last", "2", "--out", str(folder / "mean")]) == 0
    return folder


def test_every_way_to_name_the_same_weights_writes_the_same(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRETRAIN_HOME", str(home))
    generate, path = Command(tmp_path, capsys), home / "small"
    newest, older = (info.name for info in list_checkpoints(RunDirectory.locate("small").checkpoints))
    same: dict[str, list[tuple[object, ...]]] = {
        "newest": [
            ("small",),
            (path,),
            (f"small:{newest}",),
            (f"{path}:{newest}",),
            (path / "checkpoints" / newest,),
            ("small", "--checkpoint", newest),
            ("small", "--average", 1),
            (home / "hf",),
        ],
        "older": [
            (f"small:{older}",),
            (path / "checkpoints" / older,),
            ("small", "--checkpoint", older),
        ],
        "mean": [("small", "--average", 2), (home / "mean",)],
    }
    found = {}
    for kind in (("--temperature", 0), ("--temperature", 1, "--seed", 5, "--top-p", 0.9), ("--beams", 3)):
        for name, targets in same.items():
            first, *others = [generate(*target, *kind) for target in targets]
            assert all(other == first for other in others)
            found[kind, name] = first
    texts = {key: tuple(row["text"] for row in rows) for key, rows in found.items()}
    assert len(set(texts.values())) == len(texts)  # other weights and other ways to write are other texts


def test_the_text_of_the_command_is_transformers_text(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(home / "hf").eval(), Tokenizer.load(home / "hf")
    generate = Command(tmp_path, capsys)
    for options, theirs in (
        ((), {}),
        (("--beams", 3, "--score", "transformers"), {"num_beams": 3, "length_penalty": 0.6}),
    ):
        rows = generate(home / "small", *options)
        assert [row["prompt"] for row in rows] == LINES
        for line, row in zip(LINES, rows, strict=True):
            ids = torch.tensor([tokenizer.encode_batch([line])[0].tolist()])
            banned = [[tokenizer.pad_id], [tokenizer.start_id]] if tokenizer.pad_id != tokenizer.eos_id else None
            written = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=12,
                do_sample=False,
                bad_words_ids=banned,
                **theirs,
            )
            new = written[0, ids.shape[1] :].tolist()
            new = new[: new.index(tokenizer.eos_id)] if tokenizer.eos_id in new else new
            assert (row["text"], row["tokens"]) == (tokenizer.decode(new), len(new))


def test_lines_seeds_and_lengths_are_what_they_say(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate, run = Command(tmp_path, capsys), home / "small"
    drawn = ("--temperature", 1.2)
    together = generate(run, *drawn, "--seed", 7)
    for number, line in enumerate(LINES):
        assert generate(run, *drawn, "--seed", 7 + number, lines=[line]) == [together[number]]
    assert generate(run, *drawn, "--seed", 7) == together
    assert generate(run, *drawn, "--seed", 70) != together
    first, *empty, second = generate(run, lines=[LINES[0], "", "   ", LINES[1]])  # a line for a line
    assert [first, second] == generate(run, lines=LINES[:2])
    assert [(row["prompt"], row["text"], row["tokens"]) for row in empty] == [("", "", 0), ("   ", "", 0)]
    assert generate(run, "--top-k", 1, *drawn) == generate(run)
    longer, shorter = generate(run), generate(run, "--max-tokens", 5)
    for a, b in zip(longer, shorter, strict=True):
        assert b["tokens"] == min(5, a["tokens"])
        assert a["text"].startswith(b["text"].rstrip("�"))
    capsys.readouterr()
    assert cli.main(["generate", str(run), "--prompt", LINES[0], "--max-tokens", "12"]) == 0
    assert capsys.readouterr().out == LINES[0] + longer[0]["text"] + "\n"


def test_losses_of_a_run_and_of_its_export_are_those_of_documents_cut_into_their_rows(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = home / "text" / "validation"
    for target, options, row_tokens in (("small", [], 32), ("hf", ["--data", f"text={held}"], 256)):
        capsys.readouterr()
        assert cli.main(["evaluate", str(home / target), *options, "--json"]) == 0
        record = json.loads(capsys.readouterr().out)["validation"]["text"]
        trained = open_trained(str(home / target))
        nats, count, spelled = _plain_losses(trained.model, trained.tokenizer, held, row_tokens)
        assert (record["target_tokens"], record["target_bytes"]) == (count, spelled)
        assert record["loss"] == pytest.approx(nats / count, rel=1e-5)
        assert record["bits_per_byte"] == pytest.approx(nats / spelled / math.log(2), rel=1e-5)


def _plain_losses(model: torch.nn.Module, tokenizer: Tokenizer, held: Path, row_tokens: int) -> tuple[float, int, int]:
    """Nats, tokens and bytes of what follows in each document, of which a row sees no more than its own part."""
    manifest = read_manifest(store := open_store(held))
    reader, lengths = BlockReader(store, manifest), tokenizer.byte_lengths()
    nats, count, spelled = 0.0, 0, 0
    for number in range(manifest.blocks):
        block = reader.read(number)
        assert isinstance(block, TokenBlock)
        ids, ends = block.ids.tolist(), block.ends.tolist()
        edges = sorted({0, block.real_tokens, *ends, *range(0, block.real_tokens, row_tokens)})
        for begin, end in itertools.pairwise(edges):
            targets = ids[begin + 1 : end if end in ends else end + 1]
            info = SeqInfo.from_lengths([end - begin])
            nothing = torch.full((end - begin,), IGNORED_LABEL)
            with torch.no_grad():
                given = torch.tensor(ids[begin:end])
                scores = torch.log_softmax(
                    model.logits(Batch(0, given, info, nothing, None, None, 0, 0, 0, 0)).double(), -1
                )
            nats -= math.fsum(float(scores[place, token]) for place, token in enumerate(targets))
            count += len(targets)
            spelled += sum(int(lengths[token]) for token in targets)
    return nats, count, spelled
