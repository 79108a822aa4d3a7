"""A small valid config that the tests change."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from pretrain.config import config_from_dict, load_config
from pretrain.errors import ConfigError

_VALUES: dict[str, Any] = {
    "name": "tiny",
    "seed": 1,
    "tokenizer": "tokenizer.json",
    "data": {"sources": {"prose": {"path": "prose"}}},
    "model": {
        "family": "decoder",
        "vocabulary_size": 300,
        "width": 32,
        "num_heads": 4,
        "feed_forward_width": 64,
        "num_layers": 2,
    },
    "batch": {"global_batch_size": 8, "micro_batch_size": 2, "sequence_length": 32},
    "optimizer": {"kind": "adamw", "learning_rate": 0.001},
    "schedule": {"kind": "constant", "total_steps": 10},
    "checkpoint": {"every_steps": 5},
}


def values() -> dict[str, Any]:
    return copy.deepcopy(_VALUES)


def changed(path: str, value: Any) -> dict[str, Any]:
    """The values with one of them replaced or added."""
    result = values()
    node = result
    *parents, last = path.split(".")
    for part in parents:
        node = node.setdefault(part, {})
    node[last] = value
    return result


def write(path: Path, text: str = "") -> Path:
    """A config file: the base, then the given YAML; the last of two equal top-level keys must not be in both."""
    given = set(yaml.safe_load(text) or {}) if text else set()
    rest = {key: value for key, value in values().items() if key not in given}
    path.write_text(yaml.safe_dump(rest, sort_keys=False) + text)
    return path


def problems_of(content: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config_from_dict(content)
    return caught.value.problems


def problems_of_file(path: Path, *overrides: str, check_files: bool = False) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, check_files=check_files)
    return caught.value.problems
