"""Curves of a run for a picture of limited width. PURE.

Takes a reader's columns → lines of at most `points` points: of each stretch its lowest and its highest
value, so that a spike of one step stays visible at any zoom. The line that counts and the steps that a
later attempt did again are kept apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from launch.monitor.attempts import Attempt
from launch.monitor.columns import Columns
from launch.monitor.reader import RunReader
from pretrain.metrics.index import BLOCK_RECORDS

X = Literal["step", "tokens", "hours"]
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class View:
    """What part of a curve is wanted, and how.

    Attributes:
        x: what the horizontal axis counts; hours are since the run's creation.
        low, high: part of the axis; None: to its end.
        points: most points of a line.
        smooth: steps on each side over which the smoothed line is a mean; 0: no smoothed line.
    """

    x: X = "step"
    low: float | None = None
    high: float | None = None
    points: int = 1000
    smooth: int = 0


def curve(reader: RunReader, name: str, view: View) -> dict[str, Any]:
    """One field of the step records: `kept`, `smooth` and `lost` lines as [[x …], [y …]]; gaps are None."""
    kept: list[tuple[Floats, Floats]] = []
    lost: list[tuple[Floats, Floats]] = []
    means: list[tuple[Floats, Floats]] = []
    reach = view.smooth
    for attempt in reader.attempts():
        for columns in _columns(reader, attempt, name, view):
            x, y, counts = _line(reader, attempt, columns, name, view.x)
            kept.append((x[counts], y[counts]))
            lost += _lost_pieces(x, y, counts)
            blocks = reader.means.get(attempt.number)
            if blocks is not None and columns is reader.columns.get(attempt.number) and name in blocks.fields:
                # Of blocks a mean over means; the rows of the columns are their extremes.
                x, y, counts = _line(reader, attempt, blocks, name, view.x)
                reach = max(1, round(view.smooth / BLOCK_RECORDS))
                after = 2 * len(reader.blocks[attempt.number])
                means.append((x[counts], y[counts]))
                x, y, counts = _line(reader, attempt, columns, name, view.x)
                x, y, counts = x[after:], y[after:], counts[after:]
            means.append((x[counts], y[counts]))
    answer: dict[str, Any] = {"kept": _answer(*_joined(kept), view)}
    if view.smooth and sum(len(y) for _, y in means) > 2:
        x, y = _joined(means)
        answer["smooth"] = _answer(x, running_mean(y, reach), view)
    if lost:
        answer["lost"] = _with_gaps([_answer(*piece, view) for piece in lost])
    return answer


def _columns(reader: RunReader, attempt: Attempt, name: str, view: View) -> list[Columns]:
    """Where a field's points of an attempt are: the records themselves where that is a short part of a long file."""
    sparse = reader.sparse.get(attempt.number)
    if sparse is not None and name in sparse.fields:
        return [sparse]
    columns = reader.columns.get(attempt.number)
    if columns is None or name not in columns.fields:
        return []
    if reader.blocks.get(attempt.number) and (view.low is not None or view.high is not None):
        low, high = (_step_at(reader, columns, view.x, edge) for edge in (view.low, view.high))
        exact = reader.exact(attempt.number, -1e18 if low is None else low, 1e18 if high is None else high)
        if exact is not None and name in exact.fields:
            return [exact, *_tail(reader, attempt.number, columns)]
    return [columns]


def _tail(reader: RunReader, attempt: int, columns: Columns) -> list[Columns]:
    """The rows behind the blocks, which are records themselves."""
    after = 2 * len(reader.blocks[attempt])
    if after >= columns.length:
        return []
    fields = {name: values[after:] for name, values in columns.fields.items()}
    return [Columns(columns.length - after, fields)]


def _step_at(reader: RunReader, columns: Columns, x: X, edge: float | None) -> float | None:
    """The step at a place of the horizontal axis."""
    if edge is None or x == "step" or (x == "tokens" and "tokens" not in columns.fields):
        return edge
    xs = np.array(columns.fields["tokens" if x == "tokens" else "t"])
    wanted = edge if x == "tokens" else reader.events[0].t + 3600 * edge
    return float(np.interp(wanted, xs, np.array(columns.fields["step"])))


def validation_curves(reader: RunReader, name: str, view: View) -> dict[str, list[list[float | None]]]:
    """One value of the validations by source; of a step that was validated twice the later one counts."""
    kept_to = {attempt.number: attempt.kept_step for attempt in reader.attempts()}
    start_t = reader.events[0].t if reader.events else 0.0
    points: dict[str, dict[int, tuple[float, float]]] = {}
    for point in reader.validations:
        limit = kept_to.get(point.attempt)
        value = point.values.get(name)
        if value is None or (limit is not None and point.step > limit):
            continue
        x = (point.t - start_t) / 3600 if view.x == "hours" else float(point.step)
        if view.x == "tokens":
            x = _tokens_at(reader, point.attempt, point.step)
        points.setdefault(point.source, {})[point.step] = (x, float(value))
    lines = {}
    for source, by_step in points.items():
        pairs = np.array([by_step[step] for step in sorted(by_step)], dtype=np.float64)
        lines[source] = _answer(pairs[:, 0], pairs[:, 1], view)
    return lines


def running_mean(y: Floats, reach: int) -> Floats:
    """Mean over up to `reach` values on each side, the same number on both, so that it never lags; NaN counts not."""
    known = ~np.isnan(y)
    totals = np.concatenate(([0.0], np.cumsum(np.where(known, y, 0.0))))
    counts = np.concatenate(([0], np.cumsum(known)))
    place = np.arange(len(y))
    sides = np.minimum(reach, np.minimum(place, len(y) - 1 - place))
    low, high = place - sides, place + sides + 1
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: Floats = (totals[high] - totals[low]) / (counts[high] - counts[low])
    return mean


def thin(x: Floats, y: Floats, points: int) -> tuple[Floats, Floats]:
    """At most `points` points: of equally long stretches the lowest and the highest value, in order."""
    if len(y) <= points:
        return x, y
    stretches = max(1, points // 2)
    length = -(-len(y) // stretches)
    padded = np.concatenate((y, np.full(stretches * length - len(y), np.nan))).reshape(stretches, length)
    first = np.arange(stretches) * length
    lowest = np.argmin(np.where(np.isnan(padded), np.inf, padded), axis=1) + first
    highest = np.argmax(np.where(np.isnan(padded), -np.inf, padded), axis=1) + first
    chosen = np.unique(np.concatenate((lowest, highest, [0, len(y) - 1])))
    chosen = chosen[chosen < len(y)]
    return x[chosen], y[chosen]


def _line(
    reader: RunReader, attempt: Attempt, columns: Columns, name: str, x_kind: X
) -> tuple[Floats, Floats, np.ndarray[Any, np.dtype[np.bool_]]]:
    # Copies: an array that numpy looks into cannot grow.
    steps = np.array(columns.fields["step"])
    y = np.array(columns.fields[name])
    if x_kind == "hours":
        x = (np.array(columns.fields["t"]) - reader.events[0].t) / 3600
    elif x_kind == "tokens" and "tokens" in columns.fields:
        x = np.array(columns.fields["tokens"])
    else:
        x = steps
    counts = steps <= attempt.kept_step if attempt.kept_step is not None else np.ones(len(steps), dtype=bool)
    if len(steps) > 1:  # after a spike the attempt itself went back: what it did again counts
        least_behind = np.minimum.accumulate(steps[::-1])[::-1]
        counts[:-1] &= steps[:-1] < least_behind[1:]
    return x, y, counts


def _lost_pieces(x: Floats, y: Floats, counts: np.ndarray[Any, np.dtype[np.bool_]]) -> list[tuple[Floats, Floats]]:
    """Neighbouring points that do not count; the last step that counts joins a piece to the line that it left."""
    edges = np.flatnonzero(np.diff(np.concatenate(([True], counts, [True])).astype(np.int8)))
    return [
        (x[max(0, begin - 1) : end], y[max(0, begin - 1) : end])
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    ]


def _tokens_at(reader: RunReader, attempt: int, step: int) -> float:
    columns = reader.columns.get(attempt)
    if columns is None or "tokens" not in columns.fields:
        return float("nan")
    steps = np.array(columns.fields["step"])
    place = min(int(np.searchsorted(steps, step)), len(steps) - 1)
    return float(columns.fields["tokens"][place])


def _joined(pieces: list[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    if not pieces:
        empty = np.zeros(0)
        return empty, empty
    return np.concatenate([x for x, _ in pieces]), np.concatenate([y for _, y in pieces])


def _answer(x: Floats, y: Floats, view: View) -> list[list[float | None]]:
    """The part that is wanted, with one point more on each side so that lines reach the edge."""
    low = 0 if view.low is None else max(0, int(np.searchsorted(x, view.low)) - 1)
    high = len(x) if view.high is None else int(np.searchsorted(x, view.high, side="right")) + 1
    x, y = thin(x[low:high], y[low:high], view.points)
    return [x.tolist(), [None if value != value else value for value in y.tolist()]]


def _with_gaps(pieces: list[list[list[float | None]]]) -> list[list[float | None]]:
    """Several lines as one with a gap between two; in order of x and each x once, as a picture wants them."""
    points: dict[float, float | None] = {}
    for xs, ys in pieces:
        known = [(x, y) for x, y in zip(xs, ys, strict=True) if x is not None]
        points.update(known)  # of a step that was discarded twice the later value
        if known:
            # A little behind its end: where lines are joined by x, the gap must not take the last point's place.
            points[float(np.nextafter(np.float32(known[-1][0]), np.float32(np.inf)))] = None
    order = sorted(points)
    return [[*order], [points[x] for x in order]]
