"""Reads a run's records back, over all attempts.

Takes the run's store → records in the order they were written, with their attempt. A line that a
crash cut off is skipped. Where a later attempt repeated steps (it restored an older checkpoint), the
later records are the run's history: `history` drops the earlier ones, `read_attempts` keeps all.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pretrain.store import NotFoundError, Store

_FILE = re.compile(r"attempt-(\d+)(?:/(\d+))?\.jsonl")


def read_attempts(store: Store) -> dict[int, list[dict[str, Any]]]:
    """All records by attempt, both ascending; attempts without any record are absent.

    Args:
        store: the run directory's store (records lie under `metrics/`).

    Raises:
        StoreError: a file is there but cannot be read.
    """
    attempts: dict[int, list[dict[str, Any]]] = {}
    for name in sorted(store.list("metrics")):
        match = _FILE.fullmatch(name.removeprefix("metrics/"))
        if not match:
            continue
        try:
            data = store.get(name)
        except NotFoundError:  # removed since it was listed
            continue
        records = decode_records(data)
        if records:
            attempts.setdefault(int(match[1]), []).extend(records)
    return dict(sorted(attempts.items()))


def records_before(store: Store, attempt: int) -> list[tuple[int, dict[str, Any]]]:
    """(attempt, record) of all earlier attempts, in the order they were written: what a tracker may lack of them."""
    return [(n, record) for n, records in read_attempts(store).items() if n < attempt for record in records]


def decode_records(data: bytes) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file; a line torn by a crash or a full disk is left out."""
    records = []
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def history(attempts: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The run as it counts: each step and each validation once, from the latest attempt that did it."""
    latest: dict[tuple[int, tuple[str, ...]], dict[str, Any]] = {}
    for records in attempts.values():
        for record in records:
            latest[record["step"], tuple(sorted(record.get("validation", ())))] = record
    return [latest[key] for key in sorted(latest)]
