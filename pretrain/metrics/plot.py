"""The loss curve as a picture: training loss and validation bits per byte, attempts marked.

Takes a run directory's records → a PNG. Matplotlib is imported only here and only when called, with
the file-only backend, so that neither a display nor the caller's settings matter.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from pretrain.errors import RunError
from pretrain.metrics.evaluations import read_evaluations
from pretrain.metrics.history import history, read_attempts
from pretrain.metrics.sinks import MetricsHome

Axes = Any  # matplotlib.axes.Axes, named without importing it

_INK, _GRID, _MUTED = "#222222", "#e6e6e6", "#8a8a8a"
_TRAIN = "#2f6db5"
_VALIDATION = ("#d1602b", "#2f9e77", "#8e5bb5", "#b5892f")


def plot_losses(run_directory: MetricsHome, path: str | Path) -> Path:
    """Draws the run's loss curve into a PNG file and returns its path.

    Raises:
        RunError: the run has no record to draw yet.
        OSError: the file cannot be written.
    """
    attempts = read_attempts(run_directory.store)
    beside = read_evaluations(run_directory.store).values()
    records = sorted([*history(attempts), *beside], key=lambda record: int(record["step"]))
    if not records:
        raise RunError(
            f"run {run_directory.name} has no metrics yet. The loss curve needs at least one logged step. "
            "Train it first."
        )
    starts = {number: rows[0]["step"] for number, rows in attempts.items()}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_draw(run_directory.name, records, starts))
    return path


def _draw(name: str, records: list[dict[str, Any]], starts: dict[int, int]) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 4.8), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    train = [(r["step"], r["loss"]) for r in records if r.get("loss") is not None]
    validation = _validation_curves(records)
    _style(axes)
    axes.set_title(name, loc="left", fontsize=12, fontweight="bold", color=_INK, pad=16)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats per token)", color=_TRAIN)
    if train:
        _draw_training(axes, [s for s, _ in train], [v for _, v in train])
    handles, labels = axes.get_legend_handles_labels()
    if validation:
        right = axes.twinx()
        _style(right, grid=False)
        right.set_ylabel("validation (bits per byte)", color=_VALIDATION[0] if len(validation) == 1 else _INK)
        for color, (source, points) in zip(_cycle(_VALIDATION, len(validation)), validation.items(), strict=True):
            steps, values = [s for s, _ in points], [v for _, v in points]
            label = f"validation {source}: {values[-1]:.3f} bits/byte"
            right.plot(steps, values, color=color, lw=1.6, marker="o", ms=4, mec="white", mew=0.8, label=label)
        more_handles, more_labels = right.get_legend_handles_labels()
        handles, labels = handles + more_handles, labels + more_labels
    _mark_attempts(axes, starts)
    if handles:
        axes.legend(handles, labels, loc="upper right", frameon=True, framealpha=0.9, edgecolor="none", fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _validation_curves(records: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for source, values in record.get("validation", {}).items():
            if values.get("bits_per_byte") is not None:
                curves.setdefault(source, []).append((record["step"], values["bits_per_byte"]))
    return curves


def _draw_training(axes: Axes, steps: list[int], losses: list[float]) -> None:
    """The raw curve, and over it a running mean once there are enough points to hide a trend in noise."""
    label = f"training: {losses[-1]:.3f} nats/token"
    if len(losses) < 50:
        marker = "o" if len(losses) == 1 else None
        axes.plot(steps, losses, color=_TRAIN, lw=1.6, marker=marker, label=label)
        return
    axes.plot(steps, losses, color=_TRAIN, lw=0.8, alpha=0.3)
    axes.plot(steps, _running_mean(losses, len(losses) // 25), color=_TRAIN, lw=1.8, label=label)


def _running_mean(values: list[float], half_window: int) -> list[float]:
    """Centred mean. Towards the ends the window shrinks, so that it does not lag, to a quarter at least, so that
    the last point is not a single noisy value."""
    totals = [0.0]
    for value in values:
        totals.append(totals[-1] + value)
    means = []
    for i in range(len(values)):
        reach = max(half_window // 4, min(half_window, i, len(values) - 1 - i))
        low, high = max(0, i - reach), min(len(values), i + reach + 1)
        means.append((totals[high] - totals[low]) / (high - low))
    return means


def _mark_attempts(axes: Axes, starts: dict[int, int]) -> None:
    """A dashed line where each further attempt went on, named above the picture where there is room."""
    low, high = axes.get_xlim()
    last_named = -1.0
    for number, step in list(starts.items())[1:]:
        axes.axvline(step, color=_MUTED, lw=0.9, ls=(0, (4, 3)), zorder=1)
        place = (step - low) / (high - low)
        if place - last_named < 0.07:
            continue
        last_named = place
        axes.annotate(
            f"attempt {number}",
            xy=(step, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=7.5,
            color=_MUTED,
        )


def _style(axes: Axes, *, grid: bool = True) -> None:
    axes.margins(x=0.02, y=0.08)
    for side in ("top", "left", "right", "bottom"):
        axes.spines[side].set_visible(side == "bottom" and grid)
        axes.spines[side].set_color(_MUTED)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.tick_params(colors=_INK, length=0, labelsize=9)
    if grid:
        axes.grid(axis="y", color=_GRID, lw=0.8)
        axes.set_axisbelow(True)


def _cycle(colors: tuple[str, ...], count: int) -> list[str]:
    return [colors[i % len(colors)] for i in range(count)]
