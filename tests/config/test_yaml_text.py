"""YAML means what a person means; each line is one trap of YAML 1.1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.config import yaml_text
from pretrain.config.yaml_text import dump_mapping, parse_yaml, plain_scalar

MEANINGS = {
    "1e-4": 1e-4,
    "1e6": 1e6,
    "5e8": 5e8,
    "-3E+4": -3e4,
    ".5": 0.5,
    "2.": 2.0,
    "0.0": 0.0,
    "12": 12,
    "-7": -7,
    "0": 0,
    "1_000_000": 1_000_000,
    "true": True,
    "False": False,
    "null": None,
    "~": None,
    "": None,
    "None": None,
    # These stay text, for the field to take or refuse:
    "010": "010",
    "0x10": "0x10",
    "0o17": "0o17",
    "12:30": "12:30",
    "1:2:3": "1:2:3",
    "off": "off",
    "on": "on",
    "yes": "yes",
    "no": "no",
    "NO": "NO",
    "y": "y",
    ".inf": ".inf",
    ".nan": ".nan",
    "1e": "1e",
    ".": ".",
    "-": "-",
    "2026-01-02": "2026-01-02",
    "1__0": "1__0",
    "_1": "_1",
    "00.5": "00.5",
    "none": "none",
}


@pytest.mark.parametrize(("text", "meaning"), MEANINGS.items(), ids=[repr(text) for text in MEANINGS])
def test_a_plain_scalar_means_what_a_person_means(text: str, meaning: Any) -> None:
    assert plain_scalar(text) == meaning
    assert type(plain_scalar(text)) is type(meaning)
    if text != "-":  # which YAML takes for a list
        assert parse_yaml(f"key: {text}\n", "f") == ({"key": meaning}, [])


def test_quotes_make_text_of_anything() -> None:
    assert parse_yaml("a: '1e-4'\nb: \"null\"\nc: |\n  12\n", "f") == ({"a": "1e-4", "b": "null", "c": "12\n"}, [])


def test_keys_are_text_whatever_they_look_like() -> None:
    assert parse_yaml("NO: 1\n1: 2\ntrue: 3\n", "f") == ({"NO": 1, "1": 2, "true": 3}, [])


def test_an_anchor_may_be_used_again() -> None:
    assert parse_yaml("a: &x {b: 1}\nc: *x\n", "f") == ({"a": {"b": 1}, "c": {"b": 1}}, [])


PROBLEMS = {
    "a: 1\nb: 2\na: 3\n": "f, line 3, has a a second time. A key may be given once.",
    "x:\n  a: 1\n  a: 1\n": "f, line 3, has a a second time.",
    "a: [1, 2\nb: 3\n": "f, line 2, column 2, is not YAML:",
    "a: b: c\n": "f, line 1, column 5, is not YAML: mapping values are not allowed here.",
    "a:\n\t- b\n": "f, line 2, column 1, is not YAML:",
    "a: *unknown\n": "is not YAML: found undefined alias",
    "a: &x [*x]\n": "f, line 1, has an alias that contains itself.",
    "a: !!python/object/apply:os.system [ls]\n": "f, line 1, has the tag tag:yaml.org,2002:python/object",
    "a: !!int '3'\n": "f, line 1, has the tag tag:yaml.org,2002:int. Tags are not supported.",
    "? [a, b]\n: 1\n": "f, line 1, has a key that is no text.",
    "a: 1\n---\nb: 2\n": "is not YAML: but found another document",
    "a: \x01\n": "f is not YAML: special characters are not allowed",
}


@pytest.mark.parametrize(("text", "problem"), PROBLEMS.items(), ids=range(len(PROBLEMS)))
def test_what_is_not_plain_yaml_is_one_problem_with_its_place(text: str, problem: str) -> None:
    _, problems = parse_yaml(text, "f")
    assert len(problems) == 1
    assert problem in problems[0]
    assert problems[0].endswith(".")


def test_aliases_that_multiply_end_at_once() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    _, problems = parse_yaml("\n".join(lines), "f")
    assert len(problems) == 1
    assert "too many values" in problems[0]


def test_deep_nesting_is_a_problem_and_no_crash() -> None:
    _, problems = parse_yaml("[" * 1500 + "]" * 1500, "f")
    assert problems == ["f is nested too deeply. A config has a few levels. Flatten it."]


@pytest.mark.parametrize("loader", ["_FastLoader", "_Loader"])
@pytest.mark.parametrize("depth", [400, 900, 1500])
def test_no_depth_of_either_parser_ends_in_a_crash(monkeypatch: pytest.MonkeyPatch, loader: str, depth: int) -> None:
    monkeypatch.setattr(yaml_text, "_FastLoader", getattr(yaml_text, loader))
    value, problems = parse_yaml("[" * depth + "]" * depth, "f")
    assert problems in ([], ["f is nested too deeply. A config has a few levels. Flatten it."])
    assert problems or isinstance(value, list)


def test_the_parser_in_c_reads_every_config_as_the_one_in_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [path.read_text() for path in sorted(Path("configs").rglob("*.yaml"))]
    texts += ["a: 'quoted 1e-4'\nb: \"no\"\nc: |\n  1e-4\nd: [1e-4, off, ~]\n", "a: {b: *x}", "a: 1\na: 2", "- !!int 1"]
    fast = [parse_yaml(text, "f") for text in texts]
    monkeypatch.setattr(yaml_text, "_FastLoader", yaml_text._Loader)
    assert fast == [parse_yaml(text, "f") for text in texts]
    assert fast[-4] == ({"a": "quoted 1e-4", "b": "no", "c": "1e-4\n", "d": [1e-4, "off", None]}, [])


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Cn"]), max_size=12),
    st.sampled_from(sorted(MEANINGS)),
)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.dictionaries(st.text("ab.-_0", min_size=1, max_size=4), SCALARS, max_size=6))
def test_what_is_written_is_read_back_equal(content: dict[str, Any]) -> None:
    text = dump_mapping({"section": content})
    assert parse_yaml(text, "f") == ({"section": content}, [])


def test_what_is_written_means_the_same_to_other_yaml_readers() -> None:
    content = {
        "mode": "off",
        "country": "NO",
        "time": "12:30",
        "rate": "1e-4",
        "n": 1,
        "x": 1e-4,
        "f": True,
        "o": "010",
    }
    others = yaml.safe_load(dump_mapping(content))
    assert {key: value for key, value in others.items() if key != "x"} == {
        key: value for key, value in content.items() if key != "x"
    }
