"""Two runs of one config in one picture: both loss curves, what differs, and where the second was killed.

takes → the records of both, kills as (step, target) → a PNG. Matplotlib is imported only when called.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain.metrics.history import history

_ONE, _OTHER, _KILL, _INK, _GRID = "#2f6db5", "#d1602b", "#8a8a8a", "#222222", "#e6e6e6"


def plot_pair(
    untouched: Mapping[int, list[dict[str, Any]]],
    killed: Mapping[int, list[dict[str, Any]]],
    kills: Sequence[tuple[int, str]],
    title: str,
    path: Path,
) -> Path:
    """Draws the picture; gives its path.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    one, other = (_losses(dict(records)) for records in (untouched, killed))
    figure = Figure(figsize=(8.4, 5.6), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    top.set_title(title, loc="left", fontsize=12, fontweight="bold", color=_INK)
    top.plot(list(one), list(one.values()), color=_ONE, lw=3.2, alpha=0.55, label="untouched")
    top.plot(list(other), list(other.values()), color=_OTHER, lw=1.2, label=f"killed {len(kills)} times")
    top.set_ylabel("loss (nats per token)")
    both = sorted(one.keys() & other.keys())
    apart = [abs(one[step] - other[step]) for step in both]
    bottom.plot(both, apart, color=_INK, lw=1.2)
    bottom.set_ylabel("difference")
    bottom.set_xlabel(f"step; the largest difference is {max(apart, default=0.0):g}")
    if not any(apart):
        bottom.set_ylim(-1e-6, 1e-6)
    for axes in (top, bottom):
        axes.grid(axis="y", color=_GRID, lw=0.8)
        for number, (step, target) in enumerate(kills):
            label = "kill -9" if axes is top and number == 0 else None
            axes.axvline(step, color=_KILL, lw=0.9, ls=(0, (4, 3)), zorder=1, label=label)
            if axes is top and len(kills) <= 8:
                axes.annotate(target, (step, 1.0), xycoords=("data", "axes fraction"), rotation=90, fontsize=6.5,
                              ha="right", va="top", color=_KILL)  # fmt: skip
    top.legend(loc="upper right", frameon=True, framealpha=0.9, edgecolor="none", fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(buffer.getvalue())
    return path


def _losses(attempts: dict[int, list[dict[str, Any]]]) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in history(attempts) if record.get("loss") is not None}
