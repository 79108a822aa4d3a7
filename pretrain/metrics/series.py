"""Names that Prometheus knows the fields of records by, and its text format. PURE.

Takes a record -> samples by series. Meanings are those of `definitions`; a name ends in its unit. Three exporters share
this: rank 0's own (`prometheus_sink`), the dashboard's, and Ray's.
Format: prometheus.io/docs/instrumenting/exposition_formats, version 0.0.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrain.metrics.definitions import RANK_FIELDS, STEP_FIELDS, TABLES

CONTENT_TYPE = "text/plain; version=0.0.4"
Samples = dict[str, list[tuple[dict[str, str], float]]]

STEP_SERIES = {
    "step": "pretrain_step",
    "t": "pretrain_updated_timestamp_seconds",
    "loss": "pretrain_loss",
    "tokens_per_second": "pretrain_tokens_per_second",
    "tokens": "pretrain_tokens",
    "gradient_norm": "pretrain_gradient_norm",
    "learning_rate": "pretrain_learning_rate",
    "mfu": "pretrain_mfu_ratio",
    "hfu": "pretrain_hfu_ratio",
    "step_s": "pretrain_step_seconds",
    "data_wait_s": "pretrain_data_wait_seconds",
    "forward_s": "pretrain_forward_seconds",
    "backward_s": "pretrain_backward_seconds",
    "optimizer_s": "pretrain_optimizer_seconds",
    "save_stall_s": "pretrain_save_stall_seconds",
    "straggling": "pretrain_straggling_ratio",
    "eta_s": "pretrain_eta_seconds",
    "skipped_steps": "pretrain_skipped_steps",
    "rollbacks": "pretrain_rollbacks",
    "masked_rows": "pretrain_masked_rows",
    "host_bytes": "pretrain_host_bytes",
    "allocated_bytes": "pretrain_allocated_bytes",
    "reserved_bytes": "pretrain_reserved_bytes",
    "memory_copy_step": "pretrain_memory_copy_step",
    "balance_loss": "pretrain_expert_balance_loss",
    "router_z_loss": "pretrain_router_z_loss",
    "largest_expert_share": "pretrain_largest_expert_share_ratio",
    "idle_experts": "pretrain_idle_experts",
}
TABLE_SERIES = {
    "validation": (
        "source",
        {
            "loss": "pretrain_validation_loss",
            "bits_per_byte": "pretrain_validation_bpb",
            "bleu": "pretrain_validation_bleu",
            "chrf": "pretrain_validation_chrf",
        },
    ),
    "sources": (
        "source",
        {
            "loss": "pretrain_source_loss",
            "share": "pretrain_source_share_ratio",
            "planned_share": "pretrain_source_planned_share_ratio",
            "epochs": "pretrain_source_epochs",
        },
    ),
    "objectives": ("objective", {"loss": "pretrain_objective_loss"}),
    "layers": (
        "layer",
        {
            "parameter_norm": "pretrain_layer_parameter_norm",
            "update_norm": "pretrain_layer_update_norm",
            "activation_rms": "pretrain_layer_activation_rms",
        },
    ),
    "attention": (
        "layer",
        {
            "entropy_fraction": "pretrain_attention_entropy_ratio",
            "largest_score": "pretrain_attention_largest_score",
        },
    ),
}
RANK_SERIES = {"own_s": "pretrain_rank_own_seconds", "tokens_per_second": "pretrain_rank_tokens_per_second"}

# Series of records, by name: type and help. Those of whole runs are the exporter's that knows them.
SERIES: dict[str, tuple[str, str]] = {
    **{series: ("gauge", f"{STEP_FIELDS[field].meaning}, last record") for field, series in STEP_SERIES.items()},
    **{
        series: ("gauge", f"{TABLES[table][field].meaning} ({table})")
        for table, (_, names) in TABLE_SERIES.items()
        for field, series in names.items()
    },
    **{series: ("gauge", RANK_FIELDS[field].meaning) for field, series in RANK_SERIES.items()},
}


def merge_record(known: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """The newest of everything: a step record replaces the step record, tables that it lacks stay."""
    if "loss" not in record:
        return {**known, **{name: value for name, value in record.items() if name in TABLES}}
    return {**{name: known[name] for name in TABLES if name in known}, **record}


def add_record(samples: Samples, record: Mapping[str, Any], labels: Mapping[str, str]) -> None:
    """Adds what a record tells to `samples`, with these labels."""
    for field, series in STEP_SERIES.items():
        _add(samples, series, labels, record.get(field))
    for table, (label, names) in TABLE_SERIES.items():
        for row, values in record.get(table, {}).items():
            for field, series in names.items():
                _add(samples, series, {**labels, label: row}, values.get(field))
    for field, series in RANK_SERIES.items():
        for rank, value in enumerate(record.get("ranks", {}).get(field, ())):
            _add(samples, series, {**labels, "rank": str(rank)}, value)


def _add(samples: Samples, series: str, labels: Mapping[str, str], value: Any) -> None:
    if isinstance(value, int | float):
        samples.setdefault(series, []).append((dict(labels), float(value)))


def format_samples(samples: Samples, series: Mapping[str, tuple[str, str]]) -> str:
    """Prometheus' text of the samples, in the order of `series`."""
    lines = []
    for name, (kind, meaning) in series.items():
        if not samples.get(name):
            continue
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
        for labels, value in samples[name]:
            inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            lines.append(f"{name}{{{inner}}} {value!r}" if inner else f"{name} {value!r}")
    return "\n".join(lines) + "\n"


def format_series_table() -> str:
    """Every series of records as a Markdown table, for `docs/metrics.md`."""
    rows = [f"| `{name}` | {meaning} |" for name, (_, meaning) in SERIES.items()]
    return "\n".join(["| series | meaning |", "|---|---|", *rows])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
