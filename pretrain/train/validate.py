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

ASK_EVERY_BATCHES = 8  # a notice of seconds must not be spent on held-out rows


def validate(
    engine: Engine,
    sets: Mapping[str, ValidationSet],
    device: torch.device,
    beat: Callable[[], None],
    alive: Callable[[], None],
    asked_to_end: Callable[[], bool],
) -> dict[str, LossTotals] | None:
    """Loss totals over all ranks, by source; None when the run was asked to end meanwhile. A collective.

    Args:
        beat: called before each micro-batch.
        alive: called twice a second while its rows are waited for.
        asked_to_end: whether any rank was; a collective, asked now and then.
    """
    totals = {}
    for name, source in sets.items():
        total = _measure(engine, source, device, beat, alive, asked_to_end)
        if total is None:
            return None
        totals[name] = total
    return totals


def _measure(
    engine: Engine,
    source: ValidationSet,
    device: torch.device,
    beat: Callable[[], None],
    alive: Callable[[], None],
    asked_to_end: Callable[[], bool],
) -> LossTotals | None:
    nats, tokens, spelled_bytes = 0.0, 0, 0
    for number, batch in enumerate(source.batches(alive)):  # equally many on every rank
        beat()
        if number % ASK_EVERY_BATCHES == 0 and asked_to_end():
            return None
        nats += float(engine.evaluate(batch.to(device)).nll)
        tokens += batch.target_tokens
        spelled_bytes += batch.target_bytes
    sums = all_reduce_sums([nats, tokens, spelled_bytes])
    return LossTotals(float(sums[0]), int(sums[1]), int(sums[2]))
