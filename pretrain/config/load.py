"""Reads a run's config: YAML file → `extends:` → `key=value` overrides → checked, frozen `RunConfig`.

All problems are reported at once. Mappings merge key by key; a section whose `kind` or `family`
changes starts anew, because the old one's keys mean nothing to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pretrain.config.problems import examine, missing_files
from pretrain.config.schema import RunConfig
from pretrain.config.walk import tag_of
from pretrain.config.yaml_text import parse_yaml, plain_scalar
from pretrain.errors import ConfigError


def load_config(path: str | Path, overrides: Sequence[str] = (), *, check_files: bool = True) -> RunConfig:
    """The config of a YAML file with overrides such as `optimizer.learning_rate=1e-4`.

    Relative paths inside are taken from the current directory and become absolute; the path of
    `extends:` is taken from the file that holds it.

    Raises:
        ConfigError: anything wrong with the file, the values, the rules between them, or (with
            `check_files`) a tokenizer or local source that is not there. One line per problem.
    """
    values, problems = _read(Path(path), ())
    if values is None:
        raise ConfigError(problems)
    given, more = _parse_overrides(overrides)
    return _checked(merge(values, given), problems + more, check_files=check_files)


def config_from_dict(values: dict[str, Any]) -> RunConfig:
    """The config of plain values; files are not looked at. Raises ConfigError like `load_config`."""
    return _checked(values, [], check_files=False)


def with_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A config changed by `key=value`, as `resume RUN key=value` does. Raises ConfigError like `load_config`."""
    given, problems = _parse_overrides(overrides)
    return _checked(merge(config.model_dump(mode="json"), given), problems, check_files=False)


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Two mappings, the second over the first, all levels deep."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        other_kind = None not in (tag_of(old), tag_of(value)) and tag_of(old) != tag_of(value)
        if isinstance(old, dict) and isinstance(value, dict) and not other_kind:
            result[key] = merge(old, value)
        else:
            result[key] = value
    return result


def _checked(values: dict[str, Any], problems: list[str], *, check_files: bool) -> RunConfig:
    found, sound = examine(values)
    problems = [*problems, *found]
    if check_files:
        problems += missing_files(sound)
    if problems:
        raise ConfigError(problems)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:  # a gap in `examine`: its words are poorer, but it is not accepted
        raise ConfigError([f"{'.'.join(map(str, d['loc']))}: {d['msg']}" for d in error.errors()]) from None


def _read(path: Path, chain: tuple[Path, ...]) -> tuple[dict[str, Any] | None, list[str]]:
    """Values of a file and of what it extends; None when there is nothing to go on with."""
    path = path.expanduser().absolute()
    if path in chain:
        files = " -> ".join(str(file) for file in (*chain, path))
        return None, [f"extends={path} goes in a circle ({files}). A base must not extend its own user. Remove one."]
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        return None, [f"{path} is not UTF-8 (byte {error.start}). A config is UTF-8 text. Save it as such."]
    except OSError as error:
        role = f"extends={path} of {chain[-1]}" if chain else f"config={path}"
        return None, [f"{role} cannot be read: {error.strerror}. It must be a YAML file. Correct the path."]
    values, problems = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        what = "is empty" if values is None else "is not a mapping"
        return None, problems or [f"{path} {what}. A config is a mapping of sections. See configs/ for examples."]
    base = values.pop("extends", None)
    if base is None:
        return values, problems
    if not isinstance(base, str):
        return None, [
            *problems,
            f"extends={base} in {path} is not a path. It names one YAML file. Write extends: base.yaml.",
        ]
    base_values, base_problems = _read(path.parent / Path(base).expanduser(), (*chain, path))
    problems = base_problems + problems
    return (None if base_values is None else merge(base_values, values)), problems


def _parse_overrides(overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """`a.b=value` items as one nested mapping; the same key twice with other values is a problem."""
    result: dict[str, Any] = {}
    problems, seen = [], dict[str, str]()
    for item in overrides:
        key, equals, text = item.partition("=")
        key, parts = key.strip(), key.strip().split(".")
        if not equals or not all(parts):
            problems.append(f"{item!r} is not an override. It must read key=value. Write optimizer.learning_rate=1e-4.")
            continue
        if seen.setdefault(key, text) != text:
            problems.append(f"{key} is given twice ({seen[key]} and {text}). Only one can hold. Remove one of the two.")
            continue
        value, more = _override_value(key, text.strip())
        problems += more
        if not more:
            for part in reversed(parts):
                value = {part: value}
            result = merge(result, value)
    return result, problems


def _override_value(key: str, text: str) -> tuple[Any, list[str]]:
    if text[:1] in ("'", '"', "{", "["):
        return parse_yaml(text, f"override {key}")
    return plain_scalar(text), []
