"""What --json prints."""

from __future__ import annotations

import json
import math

import pytest

from launch.tables import print_json, print_rows


def test_numbers_that_are_not_finite_are_null_for_every_reader_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    body = {"a": math.nan, "b": [math.inf, 1.5, {"c": -math.inf}], "ü": "Größe", "n": 3}
    print_json(body)
    out = capsys.readouterr().out
    assert json.loads(out, parse_constant=pytest.fail) == {
        "a": None,
        "b": [None, 1.5, {"c": None}],
        "ü": "Größe",
        "n": 3,
    }
    assert "Größe" in out
    print_rows(["a"], [{"a": math.nan}], as_json=True)
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == [{"a": None}]
