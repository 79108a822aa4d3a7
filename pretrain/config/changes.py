"""What differs between two configs, and what a resume may do about it. PURE."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from pretrain.config.schema import ResumePolicy, RunConfig
from pretrain.config.units import mask_password
from pretrain.config.walk import field_at

_EFFECTS: dict[ResumePolicy, str] = {
    "free": "changes nothing that is computed",
    "logged": "applies from the next step on",
    "segment": "applies from the next step on, as a new segment of the data order",
    "refused": "refused at a resume",
}


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """One field that differs. `policy` says what a resume does with it (see `schema`)."""

    field: str
    old: Any
    new: Any
    policy: ResumePolicy

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def config_sha256(config: RunConfig) -> str:
    """Hash of every value of a config; equal exactly when the configs are."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def diff_configs(old: RunConfig, new: RunConfig) -> list[ConfigChange]:
    """Every field that differs, in the order of the schema."""
    old_values, new_values = old.model_dump(mode="json"), new.model_dump(mode="json")
    return [
        ConfigChange(".".join(path), before, after, _policy(path, old_values, new_values))
        for path, before, after in _differences((), old_values, new_values)
    ]


def _differences(path: tuple[str, ...], old: Any, new: Any) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    if old == new and type(old) is type(new):
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from _differences((*path, key), old.get(key), new.get(key))
    else:
        yield path, old, new


def _policy(path: tuple[str, ...], old: dict[str, Any], new: dict[str, Any]) -> ResumePolicy:
    # A field without a policy is a `kind` or `family`: what was trained so far would not fit any more.
    field = field_at(path, new) or field_at(path, old)
    extra = field.json_schema_extra if field else None
    policy: Any = extra.get("resume", "refused") if isinstance(extra, dict) else "refused"
    return policy


def describe_changes(changes: list[ConfigChange]) -> list[str]:
    """One line per change: `field: old -> new (what a resume does with it)`."""
    return [f"{c.field}: {show(c.old)} -> {show(c.new)} ({_EFFECTS[c.policy]})" for c in changes]


def show(value: Any) -> str:
    """A value as one would write it in a config, without the password of a URL, cut at 80 characters."""
    if isinstance(value, str):
        text = value if value and not set(value) & set(" \t\n\"'{}[],") else json.dumps(value, ensure_ascii=False)
    elif isinstance(value, float):
        text = f"{value:g}" if float(f"{value:g}") == value else repr(value)
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    text = mask_password(text)
    return text if len(text) <= 80 else text[:77] + "..."
