"""Ledger of what a run records: every field of a record with its unit and meaning.

Two kinds of record go to the sinks: one per logged optimizer step, and one per validation
(`{"step": 200, "validation": {"prose": {"loss": …}}}`). Values that are not finite are written
as null, because JSON has no word for them. `step` counts optimizer steps that are done, from 1.
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
    """

    name: str
    unit: str
    meaning: str


def _ledger(*rows: tuple[str, str, str]) -> dict[str, Metric]:
    return {name: Metric(name, unit, meaning) for name, unit, meaning in rows}


STEP_FIELDS = _ledger(
    ("t", "s", "Unix time at which the record was made"),
    ("step", "steps", "optimizer steps done, this one included"),
    ("loss", "nats/token", "negative log-likelihood of the step's targets: sum over all ranks / their number"),
    ("objective", "nats/token", "what was minimised: label smoothing and weighted z-loss included"),
    ("z_loss", "1", "mean over targets of logsumexp^2, unweighted"),
    ("learning_rate", "1", "rate that this step was taken with"),
    ("gradient_norm", "1", "global L2 norm of the gradient BEFORE clipping"),
    ("applied", "flag", "false when the step was skipped for a non-finite gradient"),
    ("skipped_steps", "steps", "steps skipped so far in the whole run"),
    ("rollbacks", "count", "times that the run went back to a checkpoint and jumped over rows"),
    ("target_tokens", "tokens", "targets that counted in this step, all ranks"),
    ("tokens", "tokens", "targets that counted since step 1, over all attempts"),
    ("masked_rows", "rows", "rows of this step ignored because their block is corrupt"),
    ("data_digest", "hex", "48-bit digest of the step's micro-batches, independent of the number of ranks"),
    ("step_s", "s", "mean wall time of a step since the last record; validation and saving excluded"),
    ("data_wait_s", "s", "time this step waited for its rows, rank 0"),
    ("data_fetch_s", "s", "time the reading thread of rank 0 waited for remote ranges since it started"),
    ("data_retries", "requests", "asked again after a failure, likewise"),
    ("data_hedges", "requests", "second ones for a slow first, likewise"),
    ("data_cache_hits", "blocks", "taken from the disk cache instead of the store, likewise"),
    ("save_stall_s", "s", "time the loop stood still for a checkpoint since the last record"),
    ("tokens_per_second", "tokens/s", "targets since the last record / time in those steps, all ranks"),
    ("mfu", "1", "model FLOPs of a step / (step_s x ranks x peak FLOP/s of a rank)"),
    ("eta_s", "s", "expected time to the last step, validation and saving included"),
    ("validation_s", "s", "wall time of the validation, all sources; in validation records only"),
)

VALIDATION_FIELDS = _ledger(
    ("loss", "nats/token", "negative log-likelihood of the source's targets: sum over all ranks / their number"),
    ("perplexity", "1", "exp(loss)"),
    ("bits_per_byte", "bits/byte", "nats of the targets / (ln 2 x bytes of text that exactly those targets spell)"),
    ("target_tokens", "tokens", "targets measured"),
    ("target_bytes", "bytes", "bytes of text that those targets spell"),
    ("bleu", "1", "BLEU of the held-out translations, 0 to 100, as sacrebleu computes it; source `translation` only"),
    ("chrf", "1", "chrF of the same, 0 to 100"),
    ("sentences", "sentences", "pairs that were translated for them, all ranks"),
)


def unknown_fields(record: Mapping[str, Any]) -> list[str]:
    """Fields of a record that the ledger does not define, as dotted names."""
    unknown = [name for name in record if name not in STEP_FIELDS and name != "validation"]
    for source, values in record.get("validation", {}).items():
        unknown += [f"validation.{source}.{name}" for name in values if name not in VALIDATION_FIELDS]
    return unknown


def format_tables() -> str:
    """Every field as Markdown tables, for `docs/metrics.md`."""
    parts = []
    for title, fields in (("Records of steps", STEP_FIELDS), ("Validation, per source", VALIDATION_FIELDS)):
        rows = [f"| `{metric.name}` | {metric.unit} | {metric.meaning} |" for metric in fields.values()]
        parts.append("\n".join([f"### {title}", "| field | unit | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)
