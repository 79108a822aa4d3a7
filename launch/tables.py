"""Plain text tables and JSON for commands that print rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def format_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns padded to their widest cell; None shows as a dash; numbers are right-aligned."""
    cells = [[_show(cell) for cell in row] for row in rows]
    widths = [max(len(line[column]) for line in [list(header), *cells]) for column in range(len(header))]
    numeric = [
        bool(rows) and all(isinstance(row[column], int | float | None) for row in rows) for column in range(len(header))
    ]
    lines = []
    for line in [list(header), *cells]:
        padded = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def print_rows(columns: Sequence[str], rows: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    """The same rows as a JSON list or as a table of `columns`."""
    if as_json:
        print_json(list(rows))
    else:
        print(format_table(columns, [[row.get(column) for column in columns] for row in rows]))


def print_json(value: Any) -> None:
    """What --json prints: JSON as everybody reads it, so numbers that are not finite are null."""
    from pretrain.metrics.sinks import finite

    print(json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False))


def _show(cell: Any) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.4g}" if abs(cell) < 1e4 else f"{cell:,.0f}"
    return str(cell)
