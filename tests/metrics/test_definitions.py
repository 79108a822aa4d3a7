"""The table of the docs is the registry, and the dashboard draws nothing that it does not define."""

from __future__ import annotations

import re
from pathlib import Path

from pretrain.metrics.definitions import STEP_FIELDS, VALIDATION_FIELDS, format_tables

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_of_the_docs_is_the_registry() -> None:
    assert format_tables() in (ROOT / "docs" / "metrics.md").read_text()


def test_the_dashboard_draws_only_fields_that_are_defined() -> None:
    source = (ROOT / "launch" / "monitor" / "static" / "charts.js").read_text()
    drawn = re.findall(r'field: "([\w.]+)"', source)
    assert len(drawn) == 9
    known = set(STEP_FIELDS) | {f"validation.{name}" for name in VALIDATION_FIELDS}
    assert set(drawn) <= known
