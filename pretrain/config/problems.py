"""What is wrong with the values of a config, in words: all problems at once. PURE apart from `missing_files`.

Each section is checked on its own, so that a wrong key in one does not hide a wrong batch in
another; the rules between sections run on those that are sound.
"""

from __future__ import annotations

import difflib
import functools
import os
from contextlib import suppress
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from pretrain.config.changes import show
from pretrain.config.rules import broken_rules
from pretrain.config.schema import RunConfig, SourceConfig
from pretrain.config.walk import all_paths, field_at, literal_values, names_at, tag_of, tags_at


def examine(values: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Every problem of a config's values (names, types, bounds, rules between sections), and the sound sections."""
    problems: list[str] = [_unknown((key,), values) for key in values if key not in RunConfig.model_fields]
    sound: dict[str, Any] = {}
    for name, field in RunConfig.model_fields.items():
        if name not in values:
            if field.is_required():
                problems.append(_missing((name,), values))
            else:
                sound[name] = field.get_default(call_default_factory=True)
            continue
        adapter: TypeAdapter[Any] = _adapter(name)
        try:
            sound[name] = adapter.validate_python(values[name])
        except ValidationError as error:
            problems += [_explain(name, details, values) for details in error.errors(include_url=False)]
            rest = _without_unknown(values[name], error)
            if rest is not None:
                with suppress(ValidationError):  # reported already
                    sound[name] = adapter.validate_python(rest)
    return [*dict.fromkeys(problems), *broken_rules(sound)], sound


def missing_files(sound: dict[str, Any]) -> list[str]:
    """Local files that sound sections name and that are not there; URLs are looked at when they are opened."""
    problems = []
    tokenizer, data = sound.get("tokenizer"), sound.get("data")
    if tokenizer is not None and "://" not in tokenizer and not _is_tokenizer(tokenizer):
        problems.append(
            f"tokenizer={tokenizer} does not exist. It must be a tokenizer.json. "
            "Correct the path or make one with pretrain tokenizer train."
        )
    raw = getattr(data, "reading", "blocks") == "raw"  # tars and patterns are looked for when they are opened
    for group in ("validation",) if raw else ("sources", "validation"):
        sources: dict[str, SourceConfig] = getattr(data, group, {})
        problems += [_missing_source(f"data.{group}.{name}.path", source) for name, source in sources.items()]
    return [problem for problem in problems if problem]


def _is_tokenizer(path: str) -> bool:
    """A tokenizer.json, or the directory of one."""
    return os.path.isfile(path) or os.path.isfile(os.path.join(path, "tokenizer.json"))


def _missing_source(field: str, source: SourceConfig) -> str:
    if "://" in source.path or os.path.isfile(os.path.join(source.path, "manifest.json")):
        return ""
    what = "has no manifest.json" if os.path.isdir(source.path) else "does not exist"
    return (
        f"{field}={source.path} {what}. It must be a directory that data build made. "
        "Correct the path or build it with pretrain data build."
    )


@functools.cache
def _adapter(name: str) -> TypeAdapter[Any]:
    # The field's own validators, checks and discriminator, taken as pydantic put them together.
    field = RunConfig.model_fields[name]
    annotation: Any = Annotated[field.annotation, field]
    return TypeAdapter(annotation)


def _without_unknown(values: Any, error: ValidationError) -> Any:
    """A copy of a section without its unknown keys; None when something else is wrong too."""
    if not isinstance(values, dict) or any(details["type"] != "extra_forbidden" for details in error.errors()):
        return None
    unknown = {_path((), details["loc"], values) for details in error.errors()}

    def copy(node: Any, path: tuple[str, ...]) -> Any:
        if not isinstance(node, dict):
            return node
        return {key: copy(value, (*path, key)) for key, value in node.items() if (*path, key) not in unknown}

    return copy(values, ())


def _path(start: tuple[str, ...], loc: tuple[int | str, ...], values: Any) -> tuple[str, ...]:
    """The keys of an error's location: without the names of union members that pydantic puts between."""
    path = list(start)
    for index, part in enumerate(loc):
        last = index == len(loc) - 1
        if (
            isinstance(values, dict)
            and part not in values
            and ((part == tag_of(values) and not last) or part == "[key]")
        ):
            continue
        path.append(str(part))
        values = values.get(part) if isinstance(values, dict) else None
    return tuple(path)


def _explain(section: str, details: ErrorDetails, values: dict[str, Any]) -> str:
    path = _path((section,), details["loc"], values[section])
    kind, context = details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(path, values)
    if kind == "missing":
        return _missing(path, values)
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        return _wrong_tag(path, kind, context)
    field, name, given = field_at(path, values), ".".join(path), show(details["input"])
    meaning = f" ({field.description})" if field and field.description else ""
    if kind == "value_error":
        return f"{name}={given} {context['error']}{meaning}."
    if kind == "literal_error":
        choices = ", ".join(show(value) for value in literal_values(field))
        near = _near(given, [show(value) for value in literal_values(field)])
        return f"{name}={given} is not one of {choices}{meaning}. Set {name}={near or choices.split(', ')[0]}."
    rule = _bound(kind, context)
    if rule:
        return f"{name}={given} is out of bounds. The rule is {rule}{meaning}. Set {name} accordingly."
    if kind == "string_pattern_mismatch":
        rule = field.description if field and field.description else details["msg"]
        return f"{name}={given} is not allowed. The rule: {rule}. Set another {name}."
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return (
            f"{name}={given} is not a mapping. It is a section with keys of its own. Write {name}: and its keys below."
        )
    return f"{name}={given} does not fit: {details['msg'].lower()}{meaning}. Correct {name}."


def _bound(kind: str, context: dict[str, Any]) -> str:
    bounds = {
        "greater_than_equal": ("at least", "ge"),
        "greater_than": ("above", "gt"),
        "less_than_equal": ("at most", "le"),
        "less_than": ("below", "lt"),
    }
    if kind in bounds:
        words, key = bounds[kind]
        return f"{words} {context[key]:g}" if isinstance(context[key], float) else f"{words} {context[key]}"
    if kind in ("too_short", "string_too_short"):
        return f"at least {context.get('min_length', 1)} of them" if kind == "too_short" else "not empty"
    return ""


def _wrong_tag(path: tuple[str, ...], kind: str, context: dict[str, Any]) -> str:
    name, known = ".".join((*path, str(context["discriminator"]).strip("'"))), tags_at(path)
    if kind == "union_tag_not_found":
        return f"{name} is missing. It chooses what the section describes: {', '.join(known)}. Add {name}."
    near = _near(str(context["tag"]), known)
    hint = f"Set {name}={near}" if near else "Set one of them"
    return f"{name}={show(context['tag'])} is not known. The choices are {', '.join(known)}. {hint}."


def _missing(path: tuple[str, ...], values: dict[str, Any]) -> str:
    name, field = ".".join(path), field_at(path, values)
    if names_at(path, values):
        keys = ", ".join(names_at(path, values)[:8])
        return f"{name} is missing. The section has no default. Add {name}: with keys such as {keys}."
    meaning = f" ({field.description})" if field and field.description else ""
    return f"{name} is missing. It has no default, because it decides the result{meaning}. Add {name}."


def _unknown(path: tuple[str, ...], values: dict[str, Any]) -> str:
    """An unknown key, with the nearest known name: of the same section, or the same key elsewhere."""
    name, siblings = ".".join(path), names_at(path[:-1], values)
    taken: Any = values
    for key in path[:-1]:
        taken = taken.get(key, {}) if isinstance(taken, dict) else {}
    near = _near(path[-1], siblings)
    if near:
        return (
            f"{name} is not known. Every key must be one of the schema's. Did you mean {'.'.join((*path[:-1], near))}?"
        )
    elsewhere = [known for known in all_paths() if known.split(".")[-1] == path[-1].replace("-", "_")]
    if elsewhere:
        return f"{name} is not known. Every key must be one of the schema's. Did you mean {' or '.join(elsewhere[:3])}?"
    where = ".".join(path[:-1]) or "a config"
    return (
        f"{name} is not known. Every key must be one of the schema's. Remove it; {where} knows {', '.join(siblings)}."
    )


def _near(name: str, known: list[str]) -> str | None:
    found = difflib.get_close_matches(name.replace("-", "_").lower(), known, n=1, cutoff=0.6)
    return found[0] if found else None
