"""Tiny real sources and what a run directory says, for tests of whole runs.

Text and pairs are made here and go the real way: JSON lines → `pretrain tokenizer train` →
`pretrain data build`.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch import cli

CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "tests"
_WORDS = (
    "the a cat dog bird tree house runs sees finds under over near red blue green small and then slowly"
).split()  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """A folder with tokenizer.json, text/{train,validation} and, if built, pairs/train."""

    folder: Path

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer.json"

    def decoder(self, *overrides: str) -> list[str]:
        """Arguments of `python -m pretrain` or `pretrain train`: the tiny decoder on this text."""
        return self._on_text("tiny-decoder", *overrides)

    def moe(self, *overrides: str) -> list[str]:
        """The same for the tiny mixture of experts."""
        return self._on_text("tiny-moe", *overrides)

    def _on_text(self, config: str, *overrides: str) -> list[str]:
        return [
            str(CONFIGS / f"{config}.yaml"),
            f"tokenizer={self.tokenizer}",
            f"data.sources.text.path={self.folder / 'text' / 'train'}",
            f"data.validation.text.path={self.folder / 'text' / 'validation'}",
            *overrides,
        ]

    def encoder_decoder(self, *overrides: str) -> list[str]:
        """The same for the tiny encoder-decoder on the pairs."""
        return [
            str(CONFIGS / "tiny-encoder-decoder.yaml"),
            f"tokenizer={self.tokenizer}",
            f"data.sources.pairs.path={self.folder / 'pairs'}",
            *overrides,
        ]


def build_tiny(folder: Path, *, documents: int = 300) -> Tiny:
    """Tokenizer and text with a validation split."""
    rng = random.Random(5)
    lines = [
        {"id": f"doc-{number}", "text": " ".join(rng.choices(_WORDS, k=rng.randint(1, 60))) + ". " + str(number)}
        for number in range(documents)
    ]
    source = folder / "text.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _pretrain("tokenizer", "train", source, "--vocabulary-size", 300, "--out", folder / "tokenizer.json")
    _pretrain(
        *("data", "build", source, "--tokenizer", folder / "tokenizer.json", "--out", folder / "text"),
        *("--block-tokens", 256, "--shard-blocks", 8, "--validation-fraction", 0.1, "--workers", 1),
    )
    return Tiny(folder)


def add_pairs(tiny: Tiny, pairs: list[tuple[str, str]]) -> None:
    """Builds a pair source of capacities 32 and 32 beside the text."""
    source = tiny.folder / "pairs.jsonl"
    source.write_text("".join(json.dumps({"source": a, "target": b}) + "\n" for a, b in pairs))
    _pretrain(
        *("data", "build", source, "--tokenizer", tiny.tokenizer, "--out", tiny.folder / "pairs"),
        *("--source-field", "source", "--target-field", "target", "--source-length", 32, "--target-length", 32),
        *("--rows-per-block", 4, "--workers", 1, "--keep-duplicates"),
    )


def steps_of(run: Path) -> dict[int, dict[str, Any]]:
    """The records of finished steps by step; a step that two attempts did has that of the later one."""
    records: dict[int, dict[str, Any]] = {}
    for path in sorted((run / "metrics").glob("attempt-*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if "loss" in record:
                records[record["step"]] = record
    return records


def validations_of(run: Path) -> dict[int, dict[str, Any]]:
    """The validation records by step."""
    lines = [line for path in sorted((run / "metrics").glob("*.jsonl")) for line in path.read_text().splitlines()]
    return {record["step"]: record["validation"] for record in map(json.loads, lines) if "validation" in record}


def _pretrain(*words: object) -> None:
    code = cli.main([str(word) for word in words])
    assert code == 0, f"pretrain {' '.join(map(str, words))} ended with {code}"
