"""Finds its way in the schema: which field a dotted path means, which names exist. PURE."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from pretrain.config.schema import RunConfig, Section

TAGS = ("kind", "family")  # fields that choose between the models of a union


def tag_of(values: Any) -> str | None:
    """What chooses the model of a mapping, if it names one."""
    if isinstance(values, dict):
        for tag in TAGS:
            if isinstance(values.get(tag), str):
                return values[tag]
    return None


def options_of(annotation: Any) -> list[Any]:
    """The members of a union, `None` left out, annotations stripped."""
    if get_origin(annotation) is Annotated:
        return options_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [option for member in get_args(annotation) for option in options_of(member)]
    return [] if annotation is type(None) else [annotation]


def sections_of(annotation: Any, values: Any = None) -> list[type[Section]]:
    """The sections that an annotation allows; only the one that the mapping's kind or family names, if any."""
    sections = [option for option in options_of(annotation) if isinstance(option, type) and issubclass(option, Section)]
    chosen = [section for section in sections if tag_of(values) in tag_values(section)]
    return chosen or sections


def tag_values(section: type[Section]) -> tuple[Any, ...]:
    """The kinds or families that a section of a union stands for."""
    for tag in TAGS:
        if tag in section.model_fields:
            return get_args(section.model_fields[tag].annotation)
    return ()


def step_into(annotation: Any, key: str, values: Any) -> tuple[Any, FieldInfo | None] | None:
    """Annotation and field behind one part of a path; None when the schema knows no such name."""
    for section in sections_of(annotation, values):
        if key in section.model_fields:
            field = section.model_fields[key]
            return field.annotation, field
    for option in options_of(annotation):
        if get_origin(option) is dict:
            return get_args(option)[1], None
    return None


def field_at(path: tuple[str, ...], values: Any) -> FieldInfo | None:
    """The field that governs a path: the last one on the way that the schema describes."""
    annotation: Any = RunConfig
    found: FieldInfo | None = None
    for key in path:
        step = step_into(annotation, key, values)
        if step is None:
            return found
        annotation, field = step
        found = field or found
        values = values.get(key) if isinstance(values, dict) else None
    return found


def names_at(path: tuple[str, ...], values: Any) -> list[str]:
    """The names that may stand right below a path; none for a mapping of free names."""
    annotation: Any = RunConfig
    for key in path:
        step = step_into(annotation, key, values)
        if step is None:
            return []
        annotation = step[0]
        values = values.get(key) if isinstance(values, dict) else None
    return sorted({name for section in sections_of(annotation, values) for name in section.model_fields})


def tags_at(path: tuple[str, ...]) -> list[str]:
    """The kinds or families to choose from at a path."""
    annotation: Any = RunConfig
    for key in path:
        step = step_into(annotation, key, None)
        if step is None:
            return []
        annotation = step[0]
    return sorted(str(value) for section in sections_of(annotation) for value in tag_values(section))


@cache
def all_paths() -> tuple[str, ...]:
    """Every dotted path of the schema; free names are shown as NAME."""
    return tuple(dict.fromkeys(_paths(RunConfig, "")))


def _paths(annotation: Any, prefix: str) -> Iterator[str]:
    for section in sections_of(annotation):
        for name, field in section.model_fields.items():
            yield prefix + name
            yield from _paths(field.annotation, f"{prefix}{name}.")
    for option in options_of(annotation):
        if get_origin(option) is dict:
            yield from _paths(get_args(option)[1], f"{prefix}NAME.")


def literal_values(field: FieldInfo | None) -> list[Any]:
    """The values that a field of fixed choices allows, otherwise none."""
    if field is None:
        return []
    return [
        value for option in options_of(field.annotation) if get_origin(option) is Literal for value in get_args(option)
    ]
