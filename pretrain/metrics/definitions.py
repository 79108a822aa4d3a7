"""Registry of what a run records: every field of a record with its unit, meaning and source.

Two kinds of record go to the sinks: one per logged optimizer step, and one per validation
(`{"step": 200, "validation": {"prose": {"loss": …}}}`). A step record holds tables: `sources`, `objectives`, `ranks`
(lists, one value per rank), `layers` and `attention`. Values that are not finite are written as null, because JSON
has no word for them. `step` counts optimizer steps that are done, from 1. The tables of `docs/metrics.md` are made
from here (`python -m pretrain.metrics.definitions`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Metric:
    """One field of a record.

    Attributes:
        name: key in the record.
        unit: what one of it is; "1" for a plain ratio.
        meaning: what is measured, over what, and at which moment.
        source: where the number comes from.
    """

    name: str
    unit: str
    meaning: str
    source: str


def _registry(source: str, *rows: tuple[str, ...]) -> dict[str, Metric]:
    """Metrics of one source each; a row's fourth word names another."""
    return {row[0]: Metric(row[0], row[1], row[2], row[3] if len(row) > 3 else source) for row in rows}


STEP_FIELDS = (
    _registry(
        "training state",
        ("t", "s", "Unix time of the end of the steps or of the validation that it tells of", "clock of rank 0"),
        ("step", "steps", "optimizer steps done, this one included"),
        ("skipped_steps", "steps", "steps skipped so far in the whole run"),
        ("rollbacks", "count", "times that the run went back to a checkpoint and jumped over rows"),
        ("tokens", "tokens", "targets that counted since step 1, over all attempts"),
        ("warnings", "text", "attention heads that have gone wrong, in words; with the layers", "attention of rank 0"),
        ("memory_copy_step", "steps", "step of the newest copy of the state in the memory of the nodes", "memory tier"),
    )
    | _registry(
        "forward pass, summed over ranks",
        ("loss", "nats/token", "negative log-likelihood of the step's targets: sum over all ranks / their number"),
        (
            "objective",
            "nats/token",
            "what was minimised: label smoothing and weighted losses of logits and routers included",
        ),
        ("z_loss", "1", "mean over targets of logsumexp^2, unweighted"),
    )
    | _registry(
        "routers of all layers and ranks; mixtures of experts only",
        ("balance_loss", "1", "mean over layers and targets, unweighted; model.experts_per_token where all are even"),
        ("router_z_loss", "1", "mean over layers and targets of logsumexp^2 of the router's logits, unweighted"),
        ("largest_expert_share", "1", "of a layer's choices those of its fullest expert, layer with the largest share"),
        ("idle_experts", "count", "experts that no token of the step chose, all layers"),
    )
    | _registry(
        "optimizer step",
        ("learning_rate", "1", "rate that this step was taken with", "schedule"),
        ("gradient_norm", "1", "global L2 norm of the gradient BEFORE clipping"),
        ("applied", "flag", "false when the step was skipped for a non-finite gradient"),
    )
    | _registry(
        "loader",
        ("target_tokens", "tokens", "targets that counted in this step, all ranks"),
        ("masked_rows", "rows", "rows of this step ignored because their block is corrupt"),
        ("data_digest", "hex", "48-bit digest of the step's micro-batches, independent of the number of ranks"),
        ("data_waits", "steps", "that were not ready when they were asked for, rank 0, since it started"),
        ("data_fetch_s", "s", "time the reading thread of rank 0 waited for remote ranges since it started"),
        ("data_retries", "requests", "asked again after a failure, likewise"),
        ("data_hedges", "requests", "second ones for a slow first, likewise"),
        ("data_cache_hits", "blocks", "taken from the disk cache instead of the store, likewise"),
    )
    | _registry(
        "clock of the loop",
        ("steps", "steps", "computed since the last record, those done again included"),
        ("step_s", "s", "mean wall time of a step since the last record; validation and saving excluded"),
        ("data_wait_s", "s", "mean time a step since the last record waited for its rows, slowest rank"),
        ("forward_s", "s", "mean time of a step since the last record in forward passes, mean over ranks"),
        ("backward_s", "s", "the same in backward passes and the reduction of gradients"),
        ("optimizer_s", "s", "the same in clipping and the optimizer's step"),
        ("save_stall_s", "s", "time the loop stood still for a checkpoint since the last record"),
        ("rollback_s", "s", "time spent going back to a checkpoint since the last record"),
        ("straggling", "1", "own work (rows and forward passes) of the slowest rank / median over ranks"),
        ("tokens_per_second", "tokens/s", "targets since the last record / time in those steps, all ranks"),
        ("eta_s", "s", "expected time to the last step, validation and saving included"),
        ("validation_s", "s", "wall time of the validation, all sources; in validation records only"),
    )
    | _registry(
        "`pretrain.model.flops` and the clock",
        ("mfu", "1", "model FLOPs of a step / (step_s x ranks x peak FLOP/s of a rank)"),
        ("hfu", "1", "the same with what activation checkpointing computes again"),
        ("peak_flops", "FLOP/s", "peak of one rank that both are divided by", "config, data sheet or measured"),
    )
    | _registry(
        "operating system, CUDA allocator",
        ("host_bytes", "bytes", "resident host memory of the rank that has most"),
        ("allocated_bytes", "bytes", "device memory in tensors, rank that has most; CUDA only"),
        ("reserved_bytes", "bytes", "device memory that the allocator holds, rank that has most; CUDA only"),
    )
)

VALIDATION_FIELDS = _registry(
    "validation, summed over ranks",
    ("loss", "nats/token", "negative log-likelihood of the source's targets: sum over all ranks / their number"),
    ("perplexity", "1", "exp(loss)"),
    ("bits_per_byte", "bits/byte", "nats of the targets / (ln 2 x bytes of text that exactly those targets spell)"),
    ("target_tokens", "tokens", "targets measured"),
    ("target_bytes", "bytes", "bytes of text that those targets spell"),
    ("bleu", "1", "BLEU of the held-out translations, 0 to 100, as sacrebleu computes it; source `translation` only"),
    ("chrf", "1", "chrF of the same, 0 to 100"),
    ("sentences", "sentences", "pairs that were translated for them, all ranks"),
)

SOURCE_FIELDS = _registry(
    "order of rows",
    ("loss", "nats/token", "loss of this step's targets from the source", "forward pass, summed over ranks"),
    ("target_tokens", "tokens", "those targets", "loader"),
    ("share", "1", "rows of the source / rows, from the segment's first step to this one"),
    ("planned_share", "1", "its weight / sum of weights of the sources that the segment reads", "config"),
    ("epochs", "epochs", "rows read of the source / rows that it has, since the run began"),
)

OBJECTIVE_FIELDS = _registry(
    "forward pass, summed over ranks",
    ("loss", "nats/token", "loss of this step's targets of the objective (with ul2: of the denoiser)"),
    ("target_tokens", "tokens", "those targets", "loader"),
)

RANK_FIELDS = _registry(
    "clock of each rank's loop",
    ("own_s", "s", "mean per step since the last record of waiting for rows and forward passes, others not waited for"),
    ("data_wait_s", "s", "the part of it that waited for rows"),
    ("forward_s", "s", "the part of it in forward passes"),
    ("backward_s", "s", "mean per step in backward passes and the reduction of gradients, waits for others included"),
    ("optimizer_s", "s", "mean per step in clipping and the optimizer's step, likewise"),
    ("tokens_per_second", "tokens/s", "the rank's targets since the last record / time in those steps"),
    ("host_bytes", "bytes", "resident memory of the process", "operating system"),
    ("allocated_bytes", "bytes", "device memory in tensors; CUDA only", "CUDA allocator"),
    ("reserved_bytes", "bytes", "device memory that the allocator holds; CUDA only", "CUDA allocator"),
)

LAYER_FIELDS = _registry(
    "fp32 masters of all ranks",
    ("parameter_norm", "1", "L2 norm of the layer's weights after the step"),
    ("update_norm", "1", "L2 norm of what the step changed in them"),
    ("activation_rms", "1", "root mean square of the layer's output over the step's tokens", "forward hooks"),
)

ATTENTION_FIELDS = _registry(
    "one document of the step, rank 0, computed again densely",
    ("entropy", "nats", "mean over heads and queries that see 8 keys or more"),
    ("entropy_fraction", "1", "the same / log(number of keys seen), mean over heads"),
    ("lowest_entropy_fraction", "1", "of the head that has least"),
    ("highest_entropy_fraction", "1", "of the head that has most; above 0.99 the head is near uniform"),
    ("largest_score", "1", "largest absolute score before the softmax, all heads"),
    ("top_share", "1", "weight that the most fixed head gives to one position; above 0.95 it collapsed"),
)

RUN_FIELDS = _registry(
    "journal and records",
    ("total_steps", "steps", "optimizer steps of the whole run", "config"),
    ("attempts", "count", "number of the last attempt"),
    ("wall_s", "s", "since the run's creation, up to now while it lives"),
    ("spent_s", "s", "where that time went, by kind (see the ledger); the kinds add up to it"),
    ("goodput", "1", "part of the wall time in which steps that count were computed"),
    ("goodput_without_idle", "1", "the same without the time in which nobody trained the run"),
    ("faults", "count", "faults by cause: application, node, hang"),
    ("restarts", "count", "attempts after the first, by the cause of the end before them"),
    ("restart_s", "s", "what a restart cost: notice, end, wait, spawn, load, first step, and rework"),
    ("checkpoint_step", "steps", "step of the last committed checkpoint"),
    ("checkpoint_committed_at", "s", "when it was committed, Unix time; its age is the time since then"),
    ("checkpoint_bytes", "bytes", "its size, all ranks' files", "manifest"),
    ("checkpoint_tier", "text", "durable (a directory or object store), or memory of the nodes"),
    ("checkpoint_stall_s", "s", "how long the loop stood still for it"),
    ("checkpoint_write_s", "s", "from then until it was published"),
    (
        "checkpoint_verified",
        "text",
        "whether it is whole: its sizes match, an attempt has read every byte, or what is wrong",
        "manifest",
    ),
)
"""Facts of a whole run, which no record holds: they are computed from its directory whenever somebody looks."""

TABLES = {
    "validation": VALIDATION_FIELDS,
    "sources": SOURCE_FIELDS,
    "objectives": OBJECTIVE_FIELDS,
    "layers": LAYER_FIELDS,
    "attention": ATTENTION_FIELDS,
}
"""Fields of a record that hold tables `{name: {field: value}}`; `ranks` holds lists by field instead."""

_TITLES = {
    "Records of steps": STEP_FIELDS,
    "Validation, per source": VALIDATION_FIELDS,
    "`sources`: training rows, per source": SOURCE_FIELDS,
    "`objectives`: per objective": OBJECTIVE_FIELDS,
    "`ranks`: one value per rank": RANK_FIELDS,
    "`layers`: every metrics.layers_every_steps": LAYER_FIELDS,
    "`attention`: with the layers, per attention": ATTENTION_FIELDS,
    "Facts of a run: `pretrain report`, the page, Prometheus": RUN_FIELDS,
}


def unknown_fields(record: Mapping[str, Any]) -> list[str]:
    """Fields of a record that the registry does not define, as dotted names."""
    unknown = [name for name in record if name not in STEP_FIELDS and name not in TABLES and name != "ranks"]
    for table, fields in TABLES.items():
        for row, values in record.get(table, {}).items():
            unknown += [f"{table}.{row}.{name}" for name in values if name not in fields]
    return unknown + [f"ranks.{name}" for name in record.get("ranks", {}) if name not in RANK_FIELDS]


def metric_of(name: str) -> Metric | None:
    """The definition behind a dotted name such as `loss`, `sources.prose.share` or `validation.loss`."""
    table, _, rest = name.partition(".")
    if not rest:
        return STEP_FIELDS.get(name)
    fields = RANK_FIELDS if table == "ranks" else TABLES.get(table, {})
    return fields.get(rest.rpartition(".")[2])


def format_tables() -> str:
    """Every field as Markdown tables, for `docs/metrics.md`."""
    parts = []
    for title, fields in _TITLES.items():
        rows = [f"| `{m.name}` | {m.unit} | {m.meaning} | {m.source} |" for m in fields.values()]
        parts.append("\n".join([f"### {title}", "| field | unit | meaning | source |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(format_tables())
