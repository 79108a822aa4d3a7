"""What the dashboard's pages show, as JSON values. PURE, but for what a reader reads.

Takes readers → dicts. Values of `cluster.environment` are never shown: people put secrets there.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from launch.monitor.curves import View, curve, validation_curves
from launch.monitor.ledger import Kind, Ledger, Span
from launch.monitor.reader import RunReader
from launch.monitor.report import attempt_json, checkpoints_of, last_validations
from pretrain.errors import StoreError
from pretrain.metrics.definitions import STEP_FIELDS, TABLES
from pretrain.rundir import RunStatus
from pretrain.rundir.status import metrics_key
from pretrain.store import Store

MOST_SPANS = 800
SHORTEST = 2000
MOST_EVENTS = 200  # of a kind
MOST_CELLS = 40_000  # of a heat map
LOG_BYTES = 65536
_LOSS = re.compile(rb'"loss": ?(-?[0-9][0-9.e+-]*)')
_HIDDEN = "cluster.environment."
_EVENTS = frozenset(
    "fault committed save_failed restored started_from rolled_back step_rerun straggler quarantined config_changed "
    "takeover stopped interrupted failed".split()
)
_TILES = (
    "learning_rate",
    "gradient_norm",
    "mfu",
    "hfu",
    "peak_flops",
    "eta_s",
    "tokens",
    "step_s",
    "data_wait_s",
    "skipped_steps",
    "rollbacks",
    "masked_rows",
    "forward_s",
    "backward_s",
    "optimizer_s",
    "host_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "straggling",
    "memory_copy_step",
    "balance_loss",
    "router_z_loss",
    "largest_expert_share",
    "idle_experts",
)


def run_facts(reader: RunReader) -> dict[str, Any]:
    """Everything of a run's page but its curves and logs."""
    ledger = reader.ledger()
    return {
        "version": reader.version,
        "living": reader.living,
        "url": reader.run.url,
        "status": reader.status.to_json(),
        "values": {name: reader.last_value(name) for name in _TILES},
        "ledger": ledger.to_json(),
        "timeline": timeline(ledger),
        "attempts": [attempt_json(attempt) for attempt in reader.attempts()],
        "checkpoints": checkpoints_of(reader)[-200:],
        "validation": last_validations(reader),
        "events": _events(reader),
        "logs": sorted(reader.run.store.list("logs")),
        "fields": sorted({name for columns in reader.columns.values() for name in columns.fields}),
        "tables": _tables(reader),
        "warnings": reader.warnings,
        "heat": heat_map(reader),
        "samples": sorted(reader.run.store.list("samples"), key=lambda key: key.rpartition("-")[2])[-50:],
        "pictures": sorted(name for name in reader.run.store.list("plots") if name.endswith(".png")),
        "profiles": sorted(reader.run.store.list("profiles")),
    }


def _events(reader: RunReader) -> list[dict[str, Any]]:
    """What happened, in order: saves in a row as one, and the newest of each kind, so that faults stay in sight."""
    known = [{"kind": event.kind, "t": event.t, **event.fields} for event in reader.events if event.kind in _EVENTS]
    told: list[dict[str, Any]] = []
    for saves, group in itertools.groupby(known, key=lambda event: event["kind"] == "committed"):
        row = list(group)
        if saves and len(row) > 2:
            row = [{**row[-1], "first": row[0].get("checkpoint"), "count": len(row)}]
        told += row
    seen: Counter[str] = Counter()
    found = []
    for event in reversed(told):
        seen[event["kind"]] += 1
        if seen[event["kind"]] <= MOST_EVENTS:
            found.append(event)
    return found[::-1]


def _tables(reader: RunReader) -> dict[str, Any]:
    """The newest of every table of the records."""
    newest = reader.last_record()
    return {name: newest[name] for name in ("sources", "objectives", "layers", "attention") if name in newest}


def heat_map(reader: RunReader) -> dict[str, Any]:
    """Own work of every rank of the newest attempt over its median at that time: [rows][ranks]."""
    if not reader.ranks:
        return {"attempt": 0, "steps": [], "ratio": []}
    attempt = max(reader.ranks)
    history = reader.ranks[attempt]
    stride = max(1, -(-len(history.steps) * len(history.own_s[-1]) // MOST_CELLS))
    ratio = []
    for at in range(0, len(history.steps), stride):
        own_s = [max(column) for column in zip(*history.own_s[at : at + stride], strict=True)]
        median_s = statistics.median(own_s)
        ratio.append([round(value / median_s, 3) if median_s > 0 else 1.0 for value in own_s])
    steps = [history.steps[min(at + stride, len(history.steps)) - 1] for at in range(0, len(history.steps), stride)]
    return {"attempt": attempt, "steps": steps, "ratio": ratio, "own_s": history.own_s[-1]}


def timeline(ledger: Ledger) -> list[dict[str, Any]]:
    """The spans for a picture: neighbours of one kind as one, at most about 800; waits for data count as training.

    Slivers that no record explains join what is before them: their exact seconds are in the ledger.
    """
    spans: list[list[Any]] = []
    for span in ledger.spans:
        kind = Kind.TRAINING if span.kind is Kind.DATA_WAIT else span.kind
        short = kind is Kind.UNEXPLAINED and span.seconds < ledger.wall_s / SHORTEST
        if spans and (short or spans[-1][2:] == [kind, span.attempt]):
            spans[-1][1] = span.end
        else:
            spans.append([span.start, span.end, kind, span.attempt])
    if len(spans) > MOST_SPANS:
        spans = _slots(ledger.spans, MOST_SPANS // 2)
    return [{"start": start, "end": end, "kind": str(kind), "attempt": attempt} for start, end, kind, attempt in spans]


def _slots(spans: Sequence[Span], count: int) -> list[list[Any]]:
    """Equal slots of the whole time, each of the kind that most of it was spent on."""
    start, width = spans[0].start, (spans[-1].end - spans[0].start) / count
    slots: list[list[Any]] = []
    place = 0
    for slot in range(count):
        low, high = start + slot * width, start + (slot + 1) * width
        shares: dict[tuple[Kind, int], float] = {}
        while place < len(spans):
            span = spans[place]
            kind = Kind.TRAINING if span.kind is Kind.DATA_WAIT else span.kind
            overlap = min(high, span.end) - max(low, span.start)
            shares[kind, span.attempt] = shares.get((kind, span.attempt), 0.0) + max(0.0, overlap)
            if span.end > high:
                break
            place += 1
        most = max(shares, key=lambda key: shares[key])
        if slots and slots[-1][2:] == [*most]:
            slots[-1][1] = high
        else:
            slots.append([low, high, *most])
    return slots


def curve_facts(reader: RunReader, names: Sequence[str], view: View) -> dict[str, Any]:
    """The curves of one run by field; `validation.loss` and its like are by source."""
    answer: dict[str, Any] = {}
    for name in names:
        kind, dot, value = name.partition(".")
        if dot and kind == "validation":
            answer[name] = {"sources": validation_curves(reader, value, view)}
        else:
            answer[name] = curve(reader, name, view)
    return answer


def definitions() -> dict[str, dict[str, str]]:
    """Unit, meaning and source of every field that can be drawn; those of tables without the row's name."""
    tables = {f"{table}.{name}": metric for table, fields in TABLES.items() for name, metric in fields.items()}
    return {
        name: {"unit": metric.unit, "meaning": metric.meaning, "source": metric.source}
        for name, metric in (STEP_FIELDS | tables).items()
    }


def config_facts(readers: Sequence[RunReader]) -> dict[str, list[Any]]:
    """Every field of the configs, one value per run; None where a run lacks it."""
    flat = [_flat(reader.config.model_dump(mode="json")) if reader.config else {} for reader in readers]
    names = dict.fromkeys(name for values in flat for name in values)
    return {name: [values.get(name) for values in flat] for name in names}


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix.rstrip("."): "(hidden)" if prefix.startswith(_HIDDEN) else value}
    return {name: item for key, child in value.items() for name, item in _flat(child, f"{prefix}{key}.").items()}


def log_facts(store: Store, key: str) -> dict[str, Any]:
    """The last 64 KiB of a log, from the start of a line. Raises NotFoundError."""
    size = store.size(key)
    start = max(0, size - LOG_BYTES)
    text = store.get_range(key, start, size - start).decode(errors="replace")
    if start:
        text = text.partition("\n")[2]
    return {"key": key, "size": size, "start": start, "text": text}


def sample_facts(store: Store, key: str) -> dict[str, Any]:
    """The first 50 samples that a validation wrote. Raises NotFoundError."""
    lines = store.get(key).splitlines()[:50]
    return {"key": key, "samples": [json.loads(line) for line in lines]}


def overview_row(status: RunStatus, store: Store) -> dict[str, Any]:
    """A run in the list: its status and the losses of its last records."""
    return {**status.to_json(), "recent_losses": _recent_losses(store, status.attempt) if status.attempt else []}


def _recent_losses(store: Store, attempt: int, most: int = 48) -> list[float]:
    try:
        key = metrics_key(attempt)
        size = store.size(key)
        start = max(0, size - LOG_BYTES)
        lines = store.get_range(key, start, size - start).split(b"\n")
    except StoreError:  # not there yet, or out of reach
        return []
    # The first loss of a line is the step's own; parsing the lines took half of a row's time.
    found = [_LOSS.search(line) for line in lines[1 if start else 0 : -1] if b'"validation"' not in line]
    losses = [float(match[1]) for match in found if match]
    stride = max(1, len(losses) // most)
    return losses[::-1][::stride][:most][::-1]
