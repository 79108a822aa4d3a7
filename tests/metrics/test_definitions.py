"""The table of the docs is the registry, and the dashboard draws nothing that it does not define."""

from __future__ import annotations

import re
from pathlib import Path

from launch.monitor.prometheus import format_run_series_table
from pretrain.metrics.definitions import STEP_FIELDS, TABLES, format_tables
from pretrain.metrics.series import SERIES, format_series_table

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_of_the_docs_is_the_registry() -> None:
    assert format_tables() in (ROOT / "docs" / "metrics.md").read_text()


def test_the_dashboard_draws_only_fields_that_are_defined() -> None:
    source = (ROOT / "launch" / "monitor" / "static" / "charts.js").read_text()
    drawn = re.findall(r'field: "([\w.]+)"', source)
    drawn += re.findall(r'"(\w+)"', " ".join(re.findall(r"many: \[(.*?)\]", source)))
    tables = re.findall(r'table: "(\w+)", value: "(\w+)"(?:, also: "(\w+)")?', source)
    drawn += [f"{table}.{name}" for table, *names in tables for name in names if name]
    assert len(drawn) == 31
    known = set(STEP_FIELDS) | {f"{table}.{name}" for table, fields in TABLES.items() for name in fields}
    assert set(drawn) <= known


def test_every_series_of_prometheus_is_a_field_and_the_table_of_the_docs_has_it() -> None:
    assert format_series_table() in (ROOT / "docs" / "metrics.md").read_text()
    assert format_run_series_table() in (ROOT / "docs" / "metrics.md").read_text()
    for name, (kind, meaning) in SERIES.items():
        assert name.startswith("pretrain_")
        assert kind == "gauge"
        assert len(meaning) > 5
