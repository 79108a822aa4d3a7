"""Attention as a picture: the entropy of every head, and the maps of the layers that were asked for.

Takes plain numbers -> PNG bytes. Matplotlib is imported only when called, with the file-only backend.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_INK, _MUTED = "#222222", "#8a8a8a"
_MAX_COLUMNS = 8
_MAX_LABELS = 32
_MAX_WORD = 12


@dataclass(frozen=True, slots=True)
class HeadPicture:
    """One map: a title, weights [queries][keys], and the words of both sides."""

    title: str
    weights: Any
    query_words: Sequence[str]
    key_words: Sequence[str]


@dataclass(frozen=True, slots=True)
class EntropyGrid:
    """Entropy of every head as a fraction of the largest possible; NaN where it was not measured.

    Attributes:
        layers: names of the rows.
        fractions: [layers][heads].
    """

    layers: Sequence[str]
    fractions: Sequence[Sequence[float]]


def draw_attention(title: str, entropy: EntropyGrid, heads: Sequence[HeadPicture]) -> bytes:
    """PNG: the entropy grid above, the maps below, at most 8 in a row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(_MAX_COLUMNS, max(1, max((len(row) for row in entropy.fractions), default=1)))
    rows = math.ceil(len(heads) / columns)
    most_words = max((max(len(head.query_words), len(head.key_words)) for head in heads), default=0)
    side = 2.2 if most_words > _MAX_LABELS else 1.7 + 0.09 * most_words
    heights = (1.0 + 0.26 * len(entropy.layers), max(0.01, rows * (side + 0.3)))
    figure: Any = Figure(figsize=(max(7.0, columns * side), sum(heights) + 0.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=_INK)
    upper, lower = figure.subfigures(2, 1, height_ratios=heights)
    _draw_entropy(upper, entropy)
    panels = lower.subplots(rows, columns, squeeze=False) if heads else []
    for number, axes in enumerate(panel for row in panels for panel in row):
        if number < len(heads):
            _draw_map(axes, heads[number])
        else:
            axes.axis("off")
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": "pretrain"})
    return out.getvalue()


def _draw_entropy(figure: Any, entropy: EntropyGrid) -> None:
    axes = figure.subplots()
    image = axes.imshow(entropy.fractions, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    axes.set_title("entropy of each head, as a fraction of uniform", loc="left", fontsize=9, color=_INK)
    axes.set_yticks(range(len(entropy.layers)), entropy.layers, fontsize=7)
    heads = max(len(row) for row in entropy.fractions)
    axes.set_xticks(range(heads), [str(head) for head in range(heads)], fontsize=7)
    axes.set_xlabel("head", fontsize=8, color=_MUTED)
    for row, values in enumerate(entropy.fractions):
        for column, value in enumerate(values):
            if heads <= 16 and not math.isnan(value):
                ink = "white" if value < 0.6 else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=6, color=ink)
    figure.colorbar(image, ax=axes, fraction=0.03, pad=0.02).ax.tick_params(labelsize=7)


def _draw_map(axes: Any, head: HeadPicture) -> None:
    from matplotlib.colors import PowerNorm

    # Square root: weights of a few percent, which most are, can be told from nothing.
    axes.imshow(head.weights, norm=PowerNorm(0.5, 0, 1), cmap="Blues", interpolation="nearest")
    axes.set_title(head.title, loc="left", fontsize=8, color=_INK)
    for words, ticks in ((head.key_words, axes.set_xticks), (head.query_words, axes.set_yticks)):
        if len(words) > _MAX_LABELS:
            ticks([0, len(words) - 1], ["0", str(len(words) - 1)], fontsize=6)
        else:
            turned = {"rotation": 90} if ticks == axes.set_xticks else {}
            ticks(range(len(words)), [_shown(word) for word in words], fontsize=5.5, **turned)


def _shown(word: str) -> str:
    """A word that matplotlib draws as it is: no markup, spaces visible, a box for what the font lacks."""
    drawable = _drawable()
    text = "".join("␣" if c == " " else c if ord(c) in drawable else "□" for c in word)[:_MAX_WORD]
    return text.replace("$", r"\$")


@functools.cache
def _drawable() -> frozenset[int]:
    """Code points that the default font has."""
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())
