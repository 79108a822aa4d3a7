"""The loss plot shows what the records hold."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib.image
import pytest

from pretrain.errors import RunError
from pretrain.metrics import JsonlSink, plot_losses
from pretrain.metrics.plot import _running_mean
from tests.metrics.home import Home


def _record(home: Home, attempt: int, steps: range) -> None:
    sink = JsonlSink(home.store, home.metrics_key(attempt))
    for step in steps:
        noise = 0.25 * math.sin(step * 12.9898) * math.cos(step * 78.233)
        sink.write({"step": step, "loss": 2.2 + 6.8 * math.exp(-step / 60) + noise})
        if step % 40 == 0:
            for source, shift in (("code", 0.0), ("prose", 0.25)):
                sink.write(
                    {"step": step, "validation": {source: {"bits_per_byte": 1.1 + shift + 2 * math.exp(-step / 70)}}}
                )


def test_a_curve_with_validation_and_two_attempts_becomes_a_picture(tmp_path: Path) -> None:
    home = Home(tmp_path / "run", "quickstart")
    _record(home, 1, range(1, 191))
    _record(home, 2, range(161, 401))
    path = plot_losses(home, tmp_path / "plots/loss.png")
    pixels_YXC = matplotlib.image.imread(path)
    assert pixels_YXC.shape[0] > 500
    assert pixels_YXC.shape[1] > 1000
    assert len({tuple(pixel) for row in pixels_YXC[::7, ::7] for pixel in row.round(2)}) > 5
    bare = Home(tmp_path / "bare", "quickstart")
    _record(bare, 1, range(1, 30))
    other = plot_losses(bare, tmp_path / "bare.png")
    assert other.read_bytes() != path.read_bytes()


def test_a_run_without_records_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="run early has no metrics yet"):
        plot_losses(Home(tmp_path, "early"), tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_the_running_mean_is_the_plain_mean_of_a_centred_window() -> None:
    values = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert _running_mean(values, 1) == pytest.approx([1, 7 / 3, 14 / 3, 28 / 3, 16])
    assert _running_mean(values, 2)[2] == pytest.approx(31 / 5)
    assert _running_mean(values, 4)[4] == pytest.approx(12)  # a quarter of the window at the end
