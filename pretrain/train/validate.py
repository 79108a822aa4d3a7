"""Validation inside a run: sums over held-out rows, the same for every number of ranks.

takes → engine and validation sets; gives → losses by source. Dropout is off and nothing of the
training state is touched: no optimizer state, no gradient, no global random generator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from pretrain.data.validation import ValidationSet
from pretrain.engine.distributed import all_reduce_sums
from pretrain.engine.engine import Engine
from pretrain.generate.evaluate import LossTotals


def validate(
    engine: Engine, sets: Mapping[str, ValidationSet], device: torch.device, beat: Callable[[], None]
) -> dict[str, LossTotals]:
    """Loss totals over all ranks, by source; calls `beat` before each micro-batch. A collective."""
    return {name: _measure(engine, source, device, beat) for name, source in sets.items()}


def _measure(engine: Engine, source: ValidationSet, device: torch.device, beat: Callable[[], None]) -> LossTotals:
    nats, tokens, spelled_bytes = 0.0, 0, 0
    for batch in source.batches():
        beat()
        nats += float(engine.evaluate(batch.to(device)).nll)
        tokens += batch.target_tokens
        spelled_bytes += batch.target_bytes
    sums = all_reduce_sums([nats, tokens, spelled_bytes])
    return LossTotals(float(sums[0]), int(sums[1]), int(sums[2]))
