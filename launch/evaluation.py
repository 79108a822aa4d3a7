"""Measures a trained model: losses of held-out sources, and translations of held-out pairs.

Takes what was trained and what to measure on → an `Evaluation`. Losses come from sums over targets, so neither
batch size nor order matters; label smoothing and z-loss are left out. One process, fp32, on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from launch.trained import Trained
from pretrain.config import RunConfig
from pretrain.config.capacity import most_sentinels, row_capacity
from pretrain.config.objectives import AnyObjective, CausalLMObjective
from pretrain.config.schema import BatchConfig, SourceConfig
from pretrain.data.format import read_manifest
from pretrain.data.special_tokens import all_sentinels
from pretrain.data.validation import ValidationSet, open_validation
from pretrain.errors import UserError
from pretrain.generate.beam import BeamOptions
from pretrain.generate.evaluate import LossTotals
from pretrain.generate.scores import TranslationScores, translation_scores
from pretrain.generate.translations import Pair, Sample, translate
from pretrain.store import open_store
from pretrain.topology import World

_ROW_TOKENS = 1024  # of an exported model's rows where the block allows it


@dataclass(slots=True)
class Evaluation:
    """What was measured.

    Attributes:
        losses: by source.
        samples: translations beside their pairs, all of them.
    """

    where: str
    checkpoints: tuple[str, ...]
    losses: dict[str, LossTotals] = field(default_factory=dict)
    scores: TranslationScores | None = None
    samples: list[Sample] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        losses = {name: totals.to_record() for name, totals in self.losses.items()}
        body: dict[str, Any] = {"where": self.where, "checkpoints": list(self.checkpoints), "validation": losses}
        return body if self.scores is None else {**body, "translation": self.scores.to_json()}


def measure_losses(
    trained: Trained, sources: Mapping[str, str], *, max_rows: int | None, say: Callable[[str], None]
) -> dict[str, LossTotals]:
    """Loss totals by source.

    Args:
        sources: directories of held-out sources by name; empty means the run's own.

    Raises:
        UserError: nothing to measure on.
        DataError: a source does not fit the model or its tokenizer.
    """
    config = _config_for(trained, sources, max_rows)
    sets = open_validation(
        config,
        trained.tokenizer.byte_lengths(),
        World(),
        tokenizer_sha256=trained.tokenizer.sha256,
        special_ids=trained.tokenizer.special_ids,
    )
    losses = {}
    for name, source in sets.items():
        say(f"{name}: {source.num_rows} rows")
        losses[name] = _measure(trained, source)
    return losses


def score_translations(
    trained: Trained, pairs: Sequence[Pair], *, beams: BeamOptions | None, max_tokens: int, say: Callable[[str], None]
) -> tuple[TranslationScores, list[Sample]]:
    """Scores of the translations of all pairs, and the translations.

    Raises:
        UserError: no encoder-decoder, or sacrebleu is missing.
    """
    samples = []
    for sample in translate(trained.writer, pairs, max_tokens=max_tokens, beams=beams):
        samples.append(sample)
        if len(samples) % 100 == 0:
            say(f"{len(samples)} of {len(pairs)} translated")
    return translation_scores([s.hypothesis for s in samples], [s.reference for s in samples]), samples


def check_writable(path: str | Path) -> None:
    """That `write_samples` can write there, without a change of what is there. Raises UserError."""
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise _unwritable(path, error) from None


def write_samples(path: str | Path, samples: Sequence[Sample]) -> None:
    """One line of JSON per translation. Raises UserError where the file cannot be written."""
    try:
        Path(path).write_text("".join(sample.to_line() for sample in samples), encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: str | Path, error: OSError) -> UserError:
    return UserError(f"--samples={path} cannot be written: {error.strerror}. Name another file.")


def _measure(trained: Trained, source: ValidationSet) -> LossTotals:
    totals = LossTotals()
    with torch.inference_mode():
        for batch in source.batches():
            nats = float(trained.model(batch).nll)
            totals += LossTotals(nats, batch.target_tokens, batch.target_bytes)
    return totals


def _config_for(trained: Trained, sources: Mapping[str, str], max_rows: int | None) -> RunConfig:
    """The run's config with these held-out sources; an exported model gets one that reads the first source whole."""
    config = trained.run or _plain_config(trained, sources)
    held = {name: SourceConfig(path=path) for name, path in sources.items()} or config.data.validation
    if not held:
        raise UserError(
            f"{trained.where} names no held-out source. A loss is measured on text that was not trained on. "
            "Give --data NAME=DIRECTORY."
        )
    data = config.data.model_copy(update={"validation": held})
    limit = config.eval.max_rows if max_rows is None else max_rows
    return config.model_copy(
        update={"data": data, "eval": config.eval.model_copy(update={"max_rows": limit}), "model": trained.config}
    )


def _plain_config(trained: Trained, sources: Mapping[str, str]) -> RunConfig:
    """What an exported model is measured by: its objective; where nobody knows it, next tokens for a decoder. Pairs
    are always measured by their targets."""
    if not sources:
        raise UserError(
            f"{trained.where} is an exported model and knows no data. A loss needs held-out sources. "
            "Give --data NAME=DIRECTORY."
        )
    if trained.config.layout == "encoder":
        raise UserError(
            f"{trained.where} is an encoder: what it is asked is part of its run. An exported one has no masks. "
            "Evaluate the run."
        )
    manifest = read_manifest(open_store(next(iter(sources.values()))))
    pairs = manifest.kind == "pairs"
    objective = {"kind": "seq2seq"} if pairs else _text_objective(trained).model_dump()
    length = manifest.target_capacity if pairs else _row_length(trained, manifest.block_tokens)
    named = {name: {"path": path} for name, path in sources.items()}
    return RunConfig.model_validate(
        {
            "name": "exported",
            "seed": 0,
            "tokenizer": "tokenizer.json",
            "data": {"sources": named, "validation": named},
            "objective": objective,
            "model": trained.config.model_dump(),
            "batch": {
                "global_batch_size": 4,
                "micro_batch_size": 4,
                "sequence_length": length,
                "source_length": manifest.source_capacity if pairs else None,
            },
            "optimizer": {"kind": "sgd", "learning_rate": 1.0},
            "schedule": {"kind": "constant", "total_steps": 1},
            "checkpoint": {"every_steps": 1},
        }
    )


def _text_objective(trained: Trained) -> AnyObjective:
    """What text is measured by."""
    known = trained.objective
    return CausalLMObjective() if known is None or known.kind == "seq2seq" else known


def _row_length(trained: Trained, block_tokens: int) -> int:
    """Tokens of text in a row: a part of a block, short enough for positions and sentinels that there are."""
    objective, positions = _text_objective(trained), getattr(trained.config, "max_length", None)
    sentinels = len(all_sentinels(trained.tokenizer.special_ids))

    def fits(length: int) -> bool:
        batch = BatchConfig(global_batch_size=4, micro_batch_size=4, sequence_length=length)
        longest = row_capacity(objective, batch, trained.config.layout).longest
        return most_sentinels(objective, length) <= sentinels and (positions is None or longest <= positions)

    length = math.gcd(block_tokens, _ROW_TOKENS)
    while length % 2 == 0 and not fits(length):
        length //= 2
    return length
