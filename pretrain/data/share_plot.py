"""The shares of the sources over a run as a picture. Matplotlib is imported only when called."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

_OTHERS_COLOUR = "#b9bec6"
_MOST = 10  # sources with a colour of their own


def draw_shares(name: str, parts: Sequence[tuple[int, int, Mapping[str, float]]]) -> bytes:
    """A PNG of the share of rows that each source has in each part of a run, stacked to one.

    Args:
        name: of the run.
        parts: (first step, step behind the last, share by source), see `forecast.shares`. Of more than ten sources
            those that are small in every part are drawn together.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    edges = [first for first, _, _ in parts] + [parts[-1][1]]
    figure = Figure(figsize=(8.4, 4.4), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours, below = colormaps["tab10"].colors, [0.0] * len(parts)
    for number, (label, values) in enumerate(_layers(parts)):
        above = [low + value for low, value in zip(below, values, strict=True)]
        colour = colours[number] if number < _MOST else _OTHERS_COLOUR
        axes.stairs(above, edges, baseline=below, fill=True, color=colour, label=label)
        below = above
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_title(name, loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel("share of rows")
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False)  # in the order of the layers
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _layers(parts: Sequence[tuple[int, int, Mapping[str, float]]]) -> list[tuple[str, list[float]]]:
    """(label, share in each part) from the bottom up; the label has the share of the whole run."""
    steps = [end - first for first, end, _ in parts]

    def mean(values: Sequence[float]) -> float:
        return sum(step * value for step, value in zip(steps, values, strict=True)) / sum(steps)

    layers = {source: [of[source] for _, _, of in parts] for source in parts[0][2]}
    largest = set(sorted(layers, key=lambda source: -max(layers[source]))[:_MOST])
    drawn = {source: values for source, values in layers.items() if source in largest}
    others = [values for source, values in layers.items() if source not in largest]
    labelled = [(f"{source}: {mean(values):.1%}", values) for source, values in drawn.items()]
    if others:
        summed = [sum(column) for column in zip(*others, strict=True)]
        labelled.append((f"{len(others)} others: {mean(summed):.1%}", summed))
    return labelled
