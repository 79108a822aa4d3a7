"""The runs of a home in Prometheus' text format, from run directories alone: no Ray, nothing in the ranks.

Takes a `RunsView` → the text of `/metrics` of `pretrain dashboard`. A run that lives has everything; of one
that has ended only how it ended, so that series end with their runs. Names end in their unit.
Format: prometheus.io/docs/instrumenting/exposition_formats, version 0.0.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.monitor.ledger import Kind
from launch.monitor.reader import LIVING, RunReader
from launch.monitor.runs_view import MOST_READERS, RunsView
from pretrain.errors import PretrainError

CONTENT_TYPE = "text/plain; version=0.0.4"
# name -> type, help
SERIES = {
    "pretrain_up": ("gauge", "1 while the runs can be listed"),
    "pretrain_run_state": ("gauge", "1 for the state that a run is in"),
    "pretrain_step": ("gauge", "optimizer steps done"),
    "pretrain_total_steps": ("gauge", "optimizer steps of the whole run"),
    "pretrain_loss": ("gauge", "training loss of the last record, nats per target token"),
    "pretrain_tokens_per_second": ("gauge", "targets per second, all ranks"),
    "pretrain_updated_timestamp_seconds": ("gauge", "last sign of life, Unix time"),
    "pretrain_attempt": ("gauge", "number of the last attempt"),
    "pretrain_tokens": ("gauge", "targets that counted since step 1; falls when a run goes back to a checkpoint"),
    "pretrain_gradient_norm": ("gauge", "global L2 norm of the gradient before clipping"),
    "pretrain_learning_rate": ("gauge", "rate of the last recorded step"),
    "pretrain_mfu_ratio": ("gauge", "model FLOPs utilisation, 0 to 1"),
    "pretrain_step_seconds": ("gauge", "mean wall time of a step since the record before"),
    "pretrain_data_wait_seconds": ("gauge", "time the last recorded step waited for its rows"),
    "pretrain_eta_seconds": ("gauge", "expected time to the last step"),
    "pretrain_skipped_steps": ("gauge", "steps skipped for a gradient that was not finite"),
    "pretrain_validation_loss": ("gauge", "last validation of a source, nats per target token"),
    "pretrain_validation_bpb": ("gauge", "last validation of a source, bits per byte of text"),
    "pretrain_checkpoint_step": ("gauge", "step of the last committed checkpoint"),
    "pretrain_checkpoint_timestamp_seconds": ("gauge", "when the last checkpoint was committed, Unix time"),
    "pretrain_faults_total": ("counter", "faults by cause"),
    "pretrain_spent_seconds": ("gauge", "where the time since the run's creation went"),
    "pretrain_goodput_ratio": ("gauge", "part of the wall time in which steps that count were computed"),
}
_STATUS = {
    "step": "pretrain_step",
    "total_steps": "pretrain_total_steps",
    "loss": "pretrain_loss",
    "tokens_per_second": "pretrain_tokens_per_second",
    "updated_at": "pretrain_updated_timestamp_seconds",
    "attempt": "pretrain_attempt",
}
_FIELDS = {
    "tokens": "pretrain_tokens",
    "gradient_norm": "pretrain_gradient_norm",
    "learning_rate": "pretrain_learning_rate",
    "mfu": "pretrain_mfu_ratio",
    "step_s": "pretrain_step_seconds",
    "data_wait_s": "pretrain_data_wait_seconds",
    "eta_s": "pretrain_eta_seconds",
    "skipped_steps": "pretrain_skipped_steps",
}

CAUSES = ("application", "node", "hang")

Samples = dict[str, list[tuple[dict[str, str], float]]]


def format_metrics(view: RunsView) -> str:
    """All series of all runs."""
    samples: Samples = {name: [] for name in SERIES}
    overview = view.overview()
    samples["pretrain_up"].append(({}, 0.0 if overview["problem"] else 1.0))
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
    return _text(samples)


def _add(samples: Samples, names: Mapping[str, str], values: Mapping[str, Any], labels: dict[str, str]) -> None:
    for key, name in names.items():
        if values.get(key) is not None:
            samples[name].append((labels, float(values[key])))


def _add_reader(samples: Samples, reader: RunReader, run: dict[str, str]) -> None:
    _add(samples, _FIELDS, {field: reader.last_value(field) for field in _FIELDS}, run)
    newest = {point.source: point.values for point in reader.validations}
    for source, values in newest.items():
        names = {"loss": "pretrain_validation_loss", "bits_per_byte": "pretrain_validation_bpb"}
        _add(samples, names, values, {**run, "source": source})
    faults = dict.fromkeys(CAUSES, 0)  # from zero, so that the first one is an increase
    for event in reader.events:
        if event.kind == "fault":
            cause = str(event.fields.get("cause") or "unknown")
            faults[cause] = faults.get(cause, 0) + 1
    for cause, count in faults.items():
        samples["pretrain_faults_total"].append(({**run, "cause": cause}, float(count)))
    committed = [event for event in reader.events if event.kind == "committed"]
    if committed:
        samples["pretrain_checkpoint_step"].append((run, float(committed[-1].fields.get("step") or 0)))
        samples["pretrain_checkpoint_timestamp_seconds"].append((run, committed[-1].t))
    ledger = reader.ledger()
    for kind in Kind:
        samples["pretrain_spent_seconds"].append(({**run, "kind": str(kind)}, ledger.seconds.get(kind, 0.0)))
    if ledger.goodput is not None:
        samples["pretrain_goodput_ratio"].append((run, ledger.goodput))


def _text(samples: Samples) -> str:
    lines = []
    for name, (kind, meaning) in SERIES.items():
        if not samples[name]:
            continue
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
        for labels, value in samples[name]:
            inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            lines.append(f"{name}{{{inner}}} {value!r}" if inner else f"{name} {value!r}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
