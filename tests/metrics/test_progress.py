"""The progress line, letter by letter."""

from __future__ import annotations

import math

import pytest

from pretrain.metrics import format_progress
from pretrain.metrics.progress import format_count, format_duration


def test_a_step_record_becomes_one_line() -> None:
    record = {
        "step": 7,
        "loss": math.log(25),
        "learning_rate": 3e-4,
        "gradient_norm": 0.812,
        "applied": True,
        "tokens_per_second": 5230.0,
        "mfu": 0.412,
        "eta_s": 80.4,
    }
    assert format_progress(record, 400) == (
        "step   7/400  loss 3.219  ppl 25.0  lr 3.0e-04  grad 0.81  5.2k tok/s  mfu 41%  eta 1m20s"
    )


def test_a_skipped_step_says_so_and_unknown_values_are_left_out() -> None:
    record = {"step": 7, "loss": None, "gradient_norm": None, "applied": False, "mfu": None, "eta_s": None}
    assert format_progress(record, 9) == ("step 7/9  loss not finite  grad not finite  SKIPPED (gradient not finite)")


def test_a_validation_record_names_each_source() -> None:
    record = {"step": 20, "validation": {"prose": {"loss": 2.5, "bits_per_byte": 1.2345}, "py": {"loss": None}}}
    assert format_progress(record, 20) == (
        "step 20/20  validation prose: loss 2.500  bits/byte 1.234  "
        "validation py: loss not finite  bits/byte not finite"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.0"), (24.94, "24.9"), (317.2, "317"), (999.6, "1.0k"), (5230, "5.2k"), (12e6, "12M"), (1.26e9, "1.3B")],
)
def test_counts_take_three_digits(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0s"), (8.4, "8s"), (59.7, "1m00s"), (80, "1m20s"), (7500, "2h05m"), (86400 * 3 + 4 * 3600, "3d04h")],
)
def test_durations_take_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
