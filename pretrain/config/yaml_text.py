"""YAML as people mean it: text → plain dicts, lists and scalars; config → text. PURE.

Scalars follow YAML 1.2's core schema without its octal and hexadecimal: `1e-4` is a number; `off`,
`no`, `010` and `12:30` stay text, which the field then takes or refuses; `None` means null, since
nobody means a directory of that name. Keys are always text. A key given twice is a problem, not the
last one's win. (PyYAML's own rules read `1e-4` as text, `no` as False, `010` as 8 and `12:30` as 750.)
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from pretrain.config.schema import RunConfig

_NULL = re.compile(r"~|null|Null|NULL|None|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_FLOAT = re.compile(r"[-+]?(?!0[0-9])(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_MAX_NODES = 100_000


def plain_scalar(text: str) -> Any:
    """What an unquoted scalar means: null, a flag, a number or text."""
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    if len(text) <= 400 and _INT.fullmatch(text):
        return int(text)
    if len(text) <= 400 and _FLOAT.fullmatch(text):
        return float(text)
    return text


def parse_yaml(text: str, where: str) -> tuple[Any, list[str]]:
    """The content of a YAML text and every problem found in it.

    Args:
        text: one YAML document.
        where: how the problems name it (a path).
    """
    builder = _Builder(where)
    try:
        node = _compose(text)
        return (None if node is None else builder.build(node)), builder.problems
    except yaml.YAMLError as error:
        return None, [_syntax_problem(error, where)]
    except RecursionError:
        return None, [f"{where} is nested too deeply. A config has a few levels. Flatten it."]


class _Loader(yaml.SafeLoader):
    """Composes nodes only; the meaning of scalars is decided here, so that no YAML 1.1 rule applies."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own interface)


class _FastLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The same in C, 17 times faster on a run's config; PyYAML may be built without it."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012


def _compose(text: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_FastLoader)
    except yaml.YAMLError:
        return yaml.compose(text, Loader=_Loader)  # which says better what is wrong


class _Builder:
    """Turns nodes into values, collecting problems."""

    def __init__(self, where: str) -> None:
        self.problems: list[str] = []
        self._where = where
        self._open: set[int] = set()
        self._count = 0

    def build(self, node: yaml.Node) -> Any:
        self._count += 1
        if self._count > _MAX_NODES:
            if self._count == _MAX_NODES + 1:
                self._problem(node, "too many values. A config has a few hundred. Remove aliases that multiply")
            return None
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            return self._tag(node)
        if id(node) in self._open:
            self._problem(node, "an alias that contains itself. Values must end somewhere. Write it out")
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node)
            return [self.build(item) for item in node.value]
        finally:
            self._open.discard(id(node))

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        if node.tag == "tag:yaml.org,2002:str":
            return node.value if node.style else plain_scalar(node.value)  # plain is None in Python, "" in C
        return self._tag(node)

    def _tag(self, node: yaml.Node) -> None:
        self._problem(node, f"the tag {node.tag}. Tags are not supported. Remove it, quote text if needed")

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(key_node, "a key that is no text. Keys are names. Write name: value")
                continue
            key, value = key_node.value, self.build(value_node)
            if key in result:
                self._problem(key_node, f"{key} a second time. A key may be given once. Remove one of the two")
                continue
            result[key] = value
        return result

    def _problem(self, node: yaml.Node, what: str) -> None:
        self.problems.append(f"{self._where}, line {node.start_mark.line + 1}, has {what}.")


def _syntax_problem(error: yaml.YAMLError, where: str) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = f", line {mark.line + 1}, column {mark.column + 1}," if mark else ""
    reason = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).split("\n")[0]
    return f"{where}{line} is not YAML: {reason}. Correct the syntax there or just above."


# ------------------------------------------------------------------------------------------- writing


class _Dumper(yaml.SafeDumper):
    """Quotes text that either YAML 1.1 or `plain_scalar` would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.yaml_implicit_resolvers = {
    first: list(rules) for first, rules in yaml.SafeDumper.yaml_implicit_resolvers.items()
}
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^(?:{_FLOAT.pattern})$"), list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^None$"), ["N"])


def _number_dumper(dumper: yaml.SafeDumper, number: float) -> yaml.Node:
    # Python's own shortest form (1e-05), which plain_scalar reads back bit for bit.
    text = repr(number)
    return dumper.represent_scalar("tag:yaml.org,2002:float", text if re.search("[.e]", text) else text + ".0")


_Dumper.add_representer(float, _number_dumper)


def dump_yaml(config: RunConfig) -> str:
    """The config as YAML with every field, defaults too; `config_from_dict` of it gives an equal one."""
    return dump_mapping(config.model_dump(mode="json"))


def dump_mapping(content: dict[str, Any]) -> str:
    """Plain dicts and scalars as YAML that `parse_yaml` reads back equal."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
