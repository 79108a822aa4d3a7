"""Curves against counts on paper and a plain loop."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest

from launch.monitor.curves import View, curve, running_mean, thin, validation_curves
from launch.monitor.reader import RunReader
from tests.monitor.journals import Journal, step, validation
from tests.monitor.runs import write_run


@pytest.fixture
def torn(tmp_path: Path) -> RunReader:
    """Steps 1-6, then again from 4: 5 and 6 were discarded; validations at 2, 6 (discarded) and 6."""
    journal = Journal().at(0, "created").at(0, "attempt_started", attempt=1, ranks=1)
    journal.at(4, "committed", attempt=1, step=4).at(7, "fault", attempt=1, cause="node")
    journal.at(8, "attempt_started", attempt=2, ranks=1).at(9, "restored", attempt=2, step=4)
    journal.at(20, "completed", step=8)
    first = [{**step(number, number, 1.0), "loss": float(number), "tokens": 10 * number} for number in range(1, 7)]
    first.insert(2, validation(2.5, 2, 0.1))
    first.append(validation(6.5, 6, 0.1))
    second = [
        {**step(10 + number, number, 1.0), "loss": 100.0 + number, "tokens": 10 * number} for number in range(5, 9)
    ]
    second.insert(2, validation(16.5, 6, 0.1))
    reader = RunReader(write_run(tmp_path, "torn", journal.events, {1: first, 2: second}))
    reader.refresh()
    return reader


def test_the_line_that_counts_and_the_discarded_steps_are_apart(torn: RunReader) -> None:
    found = curve(torn, "loss", View())
    assert found["kept"] == [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 105, 106, 107, 108]]
    assert found["lost"][1] == [4, 5, 6, None]
    assert found["lost"][0][:3] == [4, 5, 6]
    assert found["lost"][0][3] > 6
    assert found["lost"][0][3] == pytest.approx(6)  # just behind, or a join by x would lose the last point
    assert "smooth" not in found


@pytest.mark.parametrize(("x", "first", "last"), [("step", 1, 8), ("tokens", 10, 80), ("hours", 1 / 3600, 18 / 3600)])
def test_the_axis_counts_steps_tokens_or_hours(torn: RunReader, x: str, first: float, last: float) -> None:
    xs = curve(torn, "loss", View(x=x))["kept"][0]  # type: ignore[arg-type]
    assert (xs[0], xs[-1]) == pytest.approx((first, last))


def test_a_validation_done_twice_counts_once(torn: RunReader) -> None:
    assert validation_curves(torn, "loss", View()) == {"text": [[2, 6], [2.5, 2.5]]}
    assert validation_curves(torn, "loss", View(x="tokens"))["text"][0] == [20, 60]
    assert validation_curves(torn, "loss", View(x="hours"))["text"][0] == pytest.approx([2.5 / 3600, 16.5 / 3600])


def test_a_zoomed_line_reaches_the_edges_of_the_picture(torn: RunReader) -> None:
    assert curve(torn, "loss", View(low=3, high=5))["kept"][0] == [2, 3, 4, 5, 6]


def test_a_field_that_was_never_recorded_is_an_empty_line(torn: RunReader) -> None:
    assert curve(torn, "mfu", View())["kept"] == [[], []]


def test_the_running_mean_is_that_of_a_plain_loop() -> None:
    rng = random.Random(3)
    values = [rng.gauss(0, 1) for _ in range(57)]
    values[20] = math.nan
    for reach in (1, 4, 100):
        expected = []
        for place in range(len(values)):
            side = min(reach, place, len(values) - 1 - place)
            window = [value for value in values[place - side : place + side + 1] if value == value]
            expected.append(sum(window) / len(window) if window else math.nan)
        np.testing.assert_allclose(running_mean(np.array(values), reach), expected)


def test_a_spike_of_one_step_survives_thinning() -> None:
    y = np.sin(np.arange(100_000) / 5000)
    y[41_234], y[70_001], y[5] = 50.0, -50.0, math.nan
    x, thinned = thin(np.arange(100_000.0), y, 1000)
    assert len(x) <= 1002
    assert (x[0], x[-1]) == (0, 99_999)
    assert 41_234 in x
    assert 70_001 in x
    assert np.all(np.diff(x) > 0)
    np.testing.assert_array_equal(thinned, y[x.astype(int)])


def test_few_points_stay_as_they_are() -> None:
    x, y = thin(np.arange(10.0), np.arange(10.0), 10)
    assert (len(x), len(y)) == (10, 10)
