"""Translations of held-out pairs with their scores: what evaluation keeps and prints.

Takes a `Writer` and pairs of texts → hypotheses, one per pair and in their order, and `Sample`s of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pretrain.errors import UserError
from pretrain.generate.beam import BeamOptions
from pretrain.generate.sampling import SamplingOptions
from pretrain.generate.text import Writer, write_texts


@dataclass(frozen=True, slots=True)
class Pair:
    """A source and what it should become."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One translation beside its pair."""

    source: str
    reference: str
    hypothesis: str

    def to_line(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"


def read_pairs(
    path: str | Path, *, source_field: str = "source", target_field: str = "target", limit: int | None = None
) -> list[Pair]:
    """The first pairs of a file of JSON lines.

    Raises:
        UserError: the file cannot be read, a line is no JSON object with both fields as text, or there is none.
    """
    pairs: list[Pair] = []
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(pairs) == limit:
                    break
                if line.strip():
                    pairs.append(_pair(json.loads(line), source_field, target_field, f"{path}:{number}"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read: {error}. Pairs are lines of JSON in UTF-8. Correct the path."
        ) from None
    if not pairs:
        raise UserError(f"{path} holds no pair. There must be something to translate. Give another file.")
    return pairs


def translate(
    writer: Writer,
    pairs: Sequence[Pair],
    *,
    max_tokens: int,
    beams: BeamOptions | None,
    alive: Callable[[], None] | None = None,
) -> Iterator[Sample]:
    """A translation of each, in their order; greedy without beams.

    Args:
        alive: called for each token.

    Raises:
        UserError: the model reads no sources; see `write_texts`.
    """
    check_translates(writer)
    sources = [pair.source for pair in pairs]
    options = SamplingOptions()
    written = write_texts(writer, sources, max_tokens=max_tokens, sampling=options, beams=beams, alive=alive)
    for pair, one in zip(pairs, written, strict=True):
        yield Sample(pair.source, pair.target, one.text.strip())


def check_translates(writer: Writer) -> None:
    """Raises UserError for a model that reads no sources."""
    if not writer.reads_sources:
        raise UserError(
            f"model.family={writer.config.family} translates nothing. Pairs are translated by encoder-decoders. "
            "Evaluate a run of one."
        )


def _pair(record: object, source_field: str, target_field: str, where: str) -> Pair:
    if isinstance(record, dict):
        source, target = record.get(source_field), record.get(target_field)
        if isinstance(source, str) and isinstance(target, str) and source.strip():
            return Pair(source, target.strip())
    raise UserError(
        f"{where} is no pair. A line is an object with the texts {source_field!r} and {target_field!r}. "
        "Name the fields with --source-field and --target-field."
    )
