"""Numbers, flags, durations and sizes as people write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrain.config.units import (
    parse_bytes,
    parse_count,
    parse_flag,
    parse_location,
    parse_real,
    parse_seconds,
    parse_text,
)

GOOD = [
    (parse_count, 3, 3),
    (parse_count, 1e3, 1000),
    (parse_count, "5e8", 500_000_000),
    (parse_count, "1_000", 1000),
    (parse_real, "1e-4", 1e-4),
    (parse_real, 2, 2.0),
    (parse_flag, "off", False),
    (parse_flag, "Yes", True),
    (parse_flag, True, True),
    (parse_seconds, 30, 30.0),
    (parse_seconds, "250ms", 0.25),
    (parse_seconds, "5m", 300.0),
    (parse_seconds, "1.5h", 5400.0),
    (parse_bytes, "24MB", 24_000_000),
    (parse_bytes, "2GiB", 2 * 2**30),
    (parse_bytes, "1.5K", 1500),
    (parse_bytes, 7, 7),
]


@pytest.mark.parametrize(("parse", "given", "meaning"), GOOD)
def test_a_value_means_what_a_person_means(parse: Callable[[Any], Any], given: Any, meaning: Any) -> None:
    assert parse(given) == meaning
    assert type(parse(given)) is type(meaning)


BAD = [
    (parse_count, 1.5, "is not a whole number"),
    (parse_count, "010", "leading zero"),
    (parse_count, "12:30", "is not a number"),
    (parse_count, True, "is a flag"),
    (parse_count, None, "is empty"),
    (parse_count, [1], "is a list"),
    (parse_count, {}, "is a mapping"),
    (parse_count, "1e400", "is not finite"),
    (parse_count, "_", "is not a number"),
    (parse_real, float("nan"), "is not finite"),
    (parse_real, "0x10", "is not a number"),
    (parse_real, "9" * 400, "is too large"),
    (parse_seconds, "9" * 400, "is not a duration"),
    (parse_flag, 1, "is not a flag"),
    (parse_flag, "maybe", "is not a flag"),
    (parse_seconds, "5 weeks", "is not a duration"),
    (parse_seconds, "12:30", "is not a duration"),
    (parse_bytes, "1.5", "is not a whole number of bytes"),
    (parse_bytes, "5 XB", "is not a size"),
    (parse_bytes, "1.2345KB", "is not a whole number of bytes"),
    (parse_text, 5, "is a number, where text is wanted. Put it in quotes"),
    (parse_text, False, "is a flag, where text is wanted. Put it in quotes"),
    (parse_text, None, "is empty"),
    (parse_location, "", "is empty"),
    (parse_location, "s3://AKIA:hunter2@bucket/runs", "holds a password. .* AWS_SECRET_ACCESS_KEY"),
]


@pytest.mark.parametrize(("parse", "given", "problem"), BAD)
def test_what_nobody_can_have_meant_is_refused(parse: Callable[[Any], Any], given: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse(given)


def test_paths_become_absolute_and_urls_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert parse_location("shards/../x") == f"{tmp_path}/x"
    assert parse_location("~/x") == "/home/someone/x"
    assert parse_location("s3://bucket/x") == "s3://bucket/x"
    assert parse_location("http://host:8080/a@b:c") == "http://host:8080/a@b:c"  # a port, and no user
    assert parse_location("/a/b") == "/a/b"
