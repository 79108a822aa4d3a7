"""The runs of a home in Prometheus' text format, from run directories alone: no Ray, nothing in the ranks.

Takes a `RunsView` → the text of `/metrics` of `pretrain dashboard`. A run that lives has everything; of one
that has ended only how it ended, so that series end with their runs. Names end in their unit.
Format: prometheus.io/docs/instrumenting/exposition_formats, version 0.0.4.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from typing import Any

from launch.monitor.ledger import Kind
from launch.monitor.reader import LIVING, RunReader
from launch.monitor.runs_view import MOST_READERS, RunsView
from pretrain.errors import PretrainError
from pretrain.metrics.definitions import RUN_FIELDS
from pretrain.metrics.series import SERIES as RECORD_SERIES
from pretrain.metrics.series import Samples, add_record, format_samples

RUN_SERIES = {
    "pretrain_total_steps": "total_steps",
    "pretrain_attempt": "attempts",
    "pretrain_checkpoint_step": "checkpoint_step",
    "pretrain_checkpoint_timestamp_seconds": "checkpoint_committed_at",
    "pretrain_checkpoint_bytes": "checkpoint_bytes",
    "pretrain_checkpoint_whole": "checkpoint_verified",
    "pretrain_faults_total": "faults",
    "pretrain_restarts_total": "restarts",
    "pretrain_restart_seconds_total": "restart_s",
    "pretrain_spent_seconds": "spent_s",
    "pretrain_goodput_ratio": "goodput",
}
"""Facts of whole runs by series: their meanings are those of the registry."""

# name -> type, help
SERIES = {
    "pretrain_up": ("gauge", "1 while the runs can be listed"),
    "pretrain_home_free_ratio": ("gauge", "free part of the disk that the runs are on; local homes only"),
    "pretrain_run_state": ("gauge", "1 for the state that a run is in"),
    **{
        series: ("counter" if series.endswith("_total") else "gauge", RUN_FIELDS[field].meaning)
        for series, field in RUN_SERIES.items()
    },
    **RECORD_SERIES,
}
_STATUS = {
    "step": "pretrain_step",
    "total_steps": "pretrain_total_steps",
    "loss": "pretrain_loss",
    "tokens_per_second": "pretrain_tokens_per_second",
    "updated_at": "pretrain_updated_timestamp_seconds",
    "attempt": "pretrain_attempt",
}
CAUSES = ("application", "node", "hang")


def format_metrics(view: RunsView) -> str:
    """All series of all runs."""
    overview = view.overview()
    samples: Samples = {"pretrain_up": [({}, 0.0 if overview["problem"] else 1.0)], "pretrain_run_state": []}
    folder = view.home.local_path("")
    if folder is not None:
        with contextlib.suppress(OSError):
            disk = shutil.disk_usage(folder)
            samples["pretrain_home_free_ratio"] = [({}, disk.free / disk.total)]
    looked = 0
    for row in overview["runs"]:
        run = {"run": row["name"]}
        samples["pretrain_run_state"].append(({**run, "state": row["state"]}, 1.0))
        if row["state"] not in LIVING:
            continue
        _add(samples, _STATUS, row, run)
        looked += 1
        if looked > MOST_READERS:  # the rest has its status alone: memory stays bounded
            continue
        try:
            with view.reading(row["name"]) as reader:
                _add_reader(samples, reader, run)
        except PretrainError:  # removed since it was listed
            continue
    return format_samples(samples, SERIES)


def _add(samples: Samples, names: Mapping[str, str], values: Mapping[str, Any], labels: dict[str, str]) -> None:
    for key, name in names.items():
        if values.get(key) is not None:
            samples.setdefault(name, []).append((labels, float(values[key])))


def run_samples(reader: RunReader) -> Samples:
    """Every series of one run, as for Ray's metrics."""
    samples: Samples = {}
    run = {"run": reader.name}
    _add(samples, _STATUS, reader.status.to_json(), run)
    _add_reader(samples, reader, run)
    return samples


def _add_reader(samples: Samples, reader: RunReader, run: dict[str, str]) -> None:
    known = {name for name in _STATUS.values() if any(labels == run for labels, _ in samples.get(name, ()))}
    found: Samples = {}
    add_record(found, reader.last_record(), run)
    for series, values in found.items():
        if series not in known:
            samples.setdefault(series, []).extend(values)
    faults = dict.fromkeys(CAUSES, 0)  # from zero, so that the first one is an increase
    for event in reader.of_kind("fault"):
        cause = str(event.fields.get("cause") or "unknown")
        faults[cause] = faults.get(cause, 0) + 1
    ledger = reader.ledger()
    restarts, spent_s = dict.fromkeys(CAUSES, 0), dict.fromkeys(CAUSES, 0.0)
    for restart in ledger.restarts:
        restarts[restart.cause] = restarts.get(restart.cause, 0) + 1
        spent_s[restart.cause] = spent_s.get(restart.cause, 0.0) + restart.seconds
    by_cause: dict[str, Mapping[str, float]] = {
        "pretrain_faults_total": faults,
        "pretrain_restarts_total": restarts,
        "pretrain_restart_seconds_total": spent_s,
    }
    for series, counts in by_cause.items():
        samples.setdefault(series, []).extend(({**run, "cause": cause}, float(n)) for cause, n in counts.items())
    committed = reader.of_kind("committed")
    if committed:
        last = {**committed[-1].fields, "t": committed[-1].t}
        names = {
            "step": "pretrain_checkpoint_step",
            "t": "pretrain_checkpoint_timestamp_seconds",
            "bytes": "pretrain_checkpoint_bytes",
        }
        _add(samples, names, last, run)
        problem = reader.checkpoint_problems().get(str(last.get("checkpoint")), "pruned")
        samples.setdefault("pretrain_checkpoint_whole", []).append((run, float(not problem)))
    for kind in Kind:
        spent = ({**run, "kind": str(kind)}, ledger.seconds.get(kind, 0.0))
        samples.setdefault("pretrain_spent_seconds", []).append(spent)
    if ledger.goodput is not None:
        samples.setdefault("pretrain_goodput_ratio", []).append((run, ledger.goodput))


def format_run_series_table() -> str:
    """Every series that is of no record as a Markdown table, for `docs/metrics.md`."""
    rows = [f"| `{name}` | {meaning} |" for name, (_, meaning) in SERIES.items() if name not in RECORD_SERIES]
    return "\n".join(["| series | meaning |", "|---|---|", *rows])
