"""Losses of two sides over each other, as a picture: one panel per comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_COLORS = {"ours": "#1f6feb", "theirs": "#d1580b"}


@dataclass(frozen=True, slots=True)
class Curve:
    """Losses of one training; `side` gives the color, and each side is named once."""

    side: str
    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]


def draw(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Writes a PNG; theirs is drawn below ours and wider, so that both are seen where they agree."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6 * len(panels), 4.2), dpi=110, layout="constrained")
    figure.suptitle(title)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        named: set[str] = set()
        for curve in sorted(panel.curves, key=lambda one: one.side != "theirs"):
            width, alpha = (1.2, 1.0) if curve.side == "ours" else (2.6, 0.55)
            label = None if curve.label in named else curve.label
            named.add(curve.label)
            axes.plot(curve.x, curve.y, color=_COLORS[curve.side], linewidth=width, alpha=alpha, label=label)
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        axes.grid(alpha=0.25)
        axes.legend()
    figure.savefig(path)
