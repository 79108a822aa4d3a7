"""The whole campaign: 200 seeded trials, 40 of them through agents and Ray, and some that kill Ray's head."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.faults import POINTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_200_hurt_runs_end_as_untouched_ones_and_each_point_was_reached_five_times() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--trials", "200", "--cluster", "40", "--heads", "4"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    assert summary["trials"] >= 200, done.stdout
    assert summary["equal"] == summary["trials"], done.stdout
    assert {point for point in POINTS if summary["points"].get(point, 0) < 5} == set()
    assert done.returncode == 0
