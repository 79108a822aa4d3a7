"""Measures of checkpoints, taken beside the training: a file of each in the run's `evaluations/`.

Takes the run's store -> validation records like those of the training (`step`, `t`, `validation` by source), with
the checkpoint that they are of. The mean of several checkpoints has names of its own: `prose (mean of 5)`.
"""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Any

from pretrain.metrics.sinks import finite
from pretrain.store import NotFoundError, Store

FOLDER = "evaluations"
_ENDING = ".json"


def evaluation_key(checkpoint: str, average: int = 1) -> str:
    """Of the measures of a checkpoint, or of its mean with the average - 1 before it."""
    return f"{FOLDER}/{checkpoint}{f'.mean{average}' if average > 1 else ''}{_ENDING}"


def write_evaluation(store: Store, key: str, record: dict[str, Any]) -> None:
    """Whole or not at all; numbers that are not finite become null. Raises StoreError."""
    store.put(key, (json.dumps(finite(record)) + "\n").encode())


def read_evaluations(store: Store, known: Container[str] = ()) -> dict[str, dict[str, Any]]:
    """All records by key, oldest checkpoint first; those of `known` keys and damaged ones are left out.

    Raises:
        StoreError: a file is there but cannot be read.
    """
    found: dict[str, dict[str, Any]] = {}
    for key in sorted(store.list(FOLDER)):
        if not key.endswith(_ENDING) or key in known:
            continue
        try:
            record = json.loads(store.get(key))
        except (NotFoundError, ValueError):
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            found[key] = record
    return found
