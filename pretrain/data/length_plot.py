"""How long the documents of a source are, as a picture. Matplotlib is imported only when called."""

from __future__ import annotations

import io
from collections.abc import Mapping

from pretrain.data.histogram import edges_and_counts

_COLOURS = {"tokens": "#2f6db5", "target": "#2f6db5", "source": "#d1602b"}


def draw_lengths(name: str, histograms: Mapping[str, Mapping[str, int]]) -> bytes:
    """A PNG of the number of documents over their length, by side.

    Args:
        name: of the source.
        histograms: by side, see `histogram`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.0), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for side, histogram in histograms.items():
        edges, counts = edges_and_counts(histogram)
        label = f"{side}: {sum(counts):,} documents" if side == "tokens" else f"{side} side: {sum(counts):,} documents"
        axes.stairs(counts, edges, fill=len(histograms) == 1, color=_COLOURS[side], label=label)
    axes.set_xscale("log", base=2)
    axes.set_title(name, loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel("tokens per document, end token included")
    axes.set_ylabel("documents per bin (four bins per doubling)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
