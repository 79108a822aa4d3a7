"""The progress line that people watch, made from a record. PURE."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def format_progress(record: Mapping[str, Any], total_steps: int) -> str:
    """`step 120/400  loss 3.214  ppl 24.9  lr 3.0e-04  grad 0.81  5.2k tok/s  mfu 41%  eta 1m20s`.

    Takes a step record or a validation record (see `definitions`); what is absent is left out.
    """
    parts = [f"step {record['step']:>{len(str(total_steps))}}/{total_steps}"]
    if "validation" in record:
        for source, values in record["validation"].items():
            if "bleu" in values:
                parts.append(f"{source}: BLEU {_number(values['bleu'], '.2f')}  chrF {_number(values['chrf'], '.2f')}")
                continue
            parts.append(
                f"validation {source}: loss {_number(values.get('loss'), '.3f')}"
                f"  bits/byte {_number(values.get('bits_per_byte'), '.3f')}"
            )
        if not record["validation"]:
            parts.append("samples written")
        return "  ".join(parts)
    if "loss" in record:
        loss = record["loss"]
        parts.append(f"loss {_number(loss, '.3f')}")
        if loss is not None and loss < 20:
            parts.append(f"ppl {format_count(math.exp(loss))}")
    if "learning_rate" in record:
        parts.append(f"lr {_number(record['learning_rate'], '.1e')}")
    if "gradient_norm" in record:
        parts.append(f"grad {_number(record['gradient_norm'], '.2f')}")
    if record.get("tokens_per_second") is not None:
        parts.append(f"{format_count(record['tokens_per_second'])} tok/s")
    if record.get("mfu") is not None:
        parts.append(f"mfu {100 * record['mfu']:.0f}%")
    if record.get("eta_s") is not None:
        parts.append(f"eta {format_duration(record['eta_s'])}")
    if record.get("applied") is False:
        parts.append("SKIPPED (gradient not finite)")
    return "  ".join(parts)


def format_count(value: int | float) -> str:
    """A number in three digits or so: 24.9, 317, 5.2k, 12M, 1.3B."""
    for limit, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * limit:
            scaled = value / limit
            return f"{scaled:.1f}{suffix}" if scaled < 9.95 else f"{scaled:.0f}{suffix}"
    return f"{value:.1f}" if value < 99.5 else f"{value:.0f}"


def format_duration(seconds: int | float) -> str:
    """A duration in its two largest units: 8s, 1m20s, 2h05m, 3d04h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def _number(value: int | float | None, spec: str) -> str:
    return "not finite" if value is None or not math.isfinite(value) else format(value, spec)
