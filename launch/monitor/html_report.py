"""`pretrain report RUN --html FILE`: a run as one file that needs nothing else: no server, no network, no CDN.

Takes a `RunReader` -> HTML with the dashboard's own styles, charts and panels inside, and the answers that the server
would give as JSON. Curves are thinned to 500 points, smoothed ones to two levels: about a megabyte in all.
"""

from __future__ import annotations

import html
import json
import math
import re
from pathlib import Path
from typing import Any, get_args

from launch.monitor.curves import View, X
from launch.monitor.facts import config_facts, curve_facts, definitions, log_facts, run_facts
from launch.monitor.reader import RunReader
from pretrain.errors import StoreError
from pretrain.metrics.definitions import STEP_FIELDS, TABLES

STATIC = Path(__file__).parent / "static"
POINTS = 500
SMOOTHED = (5, 50)
_MODULES = ("format.js", "panels.js", "charts.js", "report.js")


def make_html(reader: RunReader) -> str:
    """The whole page."""
    name = html.escape(reader.name)
    # "</" would end the script that holds the answers.
    answers = json.dumps(_rounded(_answers(reader)), separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    uplot = STATIC / "uplot"
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{name} – pretrain report</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{(uplot / 'uPlot.min.css').read_text()}\n{(STATIC / 'style.css').read_text()}</style>",
            f"<script>{(STATIC / 'theme.js').read_text()}</script>",
            f"<script>{(uplot / 'uPlot.iife.min.js').read_text()}</script></head>",
            '<body><main id="page"></main>',
            f'<script type="application/json" id="answers">{answers}</script>',
            f'<script type="module">{bundle()}</script></body></html>',
        ]
    )


def bundle() -> str:
    """The page's modules as one: ours alone, each import on a line of its own, no name twice."""
    parts = []
    for name in _MODULES:
        text = (STATIC / name).read_text()
        text = re.sub(r"^import .*\n", "", text, flags=re.MULTILINE)
        parts.append(re.sub(r"^export ", "", text, flags=re.MULTILINE))
    return "\n".join(parts)


def _answers(reader: RunReader) -> dict[str, Any]:
    facts = run_facts(reader)
    fields = [*STEP_FIELDS, "validation.loss", "validation.bits_per_byte"]
    rows = {table: names for table, names in facts["tables"].items() if table in TABLES}
    fields += [f"{table}.{row}.{field}" for table, names in rows.items() for row in names for field in TABLES[table]]
    curves: dict[str, Any] = {}
    smooth: dict[int, Any] = {level: {} for level in SMOOTHED}
    for x in get_args(X):
        found = curve_facts(reader, fields, View(x=x, points=POINTS))
        curves[x] = {name: line for name, line in found.items() if line.get("sources") or line.get("kept", [[]])[0]}
        for level in SMOOTHED:
            lines = curve_facts(
                reader, [name for name in curves[x] if "." not in name], View(x, points=POINTS, smooth=level)
            )
            smooth[level][x] = {name: line["smooth"] for name, line in lines.items() if "smooth" in line}
    return {
        "run": facts,
        "curves": curves,
        "smooth": {0: {}, **smooth},
        "fields": definitions(),
        "config": {"runs": [reader.name], "fields": config_facts([reader])},
        "log": _last_log(reader, facts["logs"]),
    }


def _last_log(reader: RunReader, keys: list[str]) -> dict[str, Any] | None:
    """The end of rank 0's last log."""
    wanted = [key for key in keys if key.endswith("rank-00000.log")] or keys
    try:
        return log_facts(reader.run.store, wanted[-1]) if wanted else None
    except StoreError:
        return None


def _rounded(value: Any) -> Any:
    """Seven digits, or whole milliseconds for times since 1970; what is not finite becomes null."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return round(value, 3) if abs(value) >= 1e6 else float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
