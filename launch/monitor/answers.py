"""The dashboard's JSON answers: which question is answered by which facts.

runs                                             all runs
run?name=N                                       one run; curves and logs apart
curves?runs=A,B&fields=loss,mfu&x=step&low=&high=&points=&smooth=&known=3,7   `known`: versions that are at hand
config?runs=A,B                                  every field of the configs
log?name=N&key=logs/attempt-001/rank-00000.log   the end of a log
sample?name=N&key=samples/prompts-00000200.jsonl what the model wrote for the prompts (step-…: for the held-out pairs)
documents?name=N&step=S&rows=16                  what a step was computed from
fields                                           units and meanings
"""

from __future__ import annotations

import re
from typing import Any, cast, get_args

from launch.documents import documents_of_step
from launch.monitor.curves import View, X
from launch.monitor.facts import config_facts, curve_facts, definitions, log_facts, run_facts, sample_facts
from launch.monitor.reader import RunReader
from launch.monitor.runs_view import RunsView
from pretrain.errors import UserError
from pretrain.metrics.definitions import STEP_FIELDS, metric_of

MOST_RUNS = 8
MOST_ROWS = 256
_SAMPLE = re.compile(r"samples/(step|prompts)-\d+\.jsonl")
_PICTURE = re.compile(r"plots/[\w.-]+\.png")
_LOG = re.compile(r"logs/(controller\.log|attempt-\d+/rank-\d+\.log)")


def answer_api(view: RunsView, path: str, query: dict[str, str]) -> dict[str, Any] | None:
    """The answer to a question, None if there is no such question.

    Raises:
        PretrainError: there is no such run or log, or it cannot be read.
        UserError: a parameter is wrong.
    """
    match path:
        case "runs":
            return view.overview()
        case "fields":
            return definitions()
        case "run":
            with view.reading(query.get("name", "")) as reader:
                return run_facts(reader)
        case "curves":
            return _curves(view, query)
        case "config":
            return _configs(view, query)
        case "documents":
            step, rows = int(_number(query, "step", 1) or 0), int(_number(query, "rows", 16, 1, MOST_ROWS) or 1)
            with view.reading(query.get("name", "")) as reader:
                return documents_of_step(reader.run, step, most_rows=rows)
        case "sample":
            key = query.get("key", "")
            if not _SAMPLE.fullmatch(key):
                raise UserError(f"key={key!r} is no sample. Choose one of the run's list of samples.")
            with view.reading(query.get("name", "")) as reader:
                return sample_facts(reader.run.store, key)
        case "log":
            key = query.get("key", "")
            if not _LOG.fullmatch(key):
                raise UserError(
                    f"key={key!r} is no log. A log is named as in the run's list of logs. Choose one there."
                )
            with view.reading(query.get("name", "")) as reader:
                return log_facts(reader.run.store, key)
    return None


def answer_picture(view: RunsView, query: dict[str, str]) -> bytes:
    """A picture of a run: loss curve, attention maps.

    Raises:
        PretrainError: there is no such run or picture.
    """
    key = query.get("key", "")
    if not _PICTURE.fullmatch(key):
        raise UserError(f"key={key!r} is no picture. Choose one of the run's list of pictures.")
    with view.reading(query.get("name", "")) as reader:
        return reader.run.store.get(key)


def _curves(view: RunsView, query: dict[str, str]) -> dict[str, Any]:
    fields = [name for name in query.get("fields", "").split(",") if name]
    unknown = [name for name in fields if metric_of(name) is None]
    if unknown:
        raise UserError(f"fields={','.join(unknown)} is not measured. A field is one of {', '.join(STEP_FIELDS)}.")
    wanted = View(
        x=_x(query.get("x", "step")),
        low=_number(query, "low"),
        high=_number(query, "high"),
        points=int(_number(query, "points", 1000, 10, 20000) or 0),
        smooth=int(_number(query, "smooth", 0, 0, 100000) or 0),
    )
    names, known = _names(query), query.get("known", "")
    if known and known == ",".join(str(version) for version in _versions(view, names).values()):
        return {"unchanged": True}
    curves: dict[str, Any] = {}
    versions: dict[str, int] = {}
    for name in names:
        with view.reading(name) as reader:
            curves[name] = curve_facts(reader, fields, wanted)
            versions[name] = reader.version
    return {"curves": curves, "versions": versions}


def _versions(view: RunsView, names: list[str]) -> dict[str, int]:
    versions = {}
    for name in names:
        with view.reading(name) as reader:
            versions[name] = reader.version
    return versions


def _configs(view: RunsView, query: dict[str, str]) -> dict[str, Any]:
    names = _names(query)
    readers: list[RunReader] = []
    for name in names:
        with view.reading(name) as reader:
            readers.append(reader)
    return {"runs": names, "fields": config_facts(readers)}


def _names(query: dict[str, str]) -> list[str]:
    names = list(dict.fromkeys(name for name in query.get("runs", "").split(",") if name))
    if not 1 <= len(names) <= MOST_RUNS:
        raise UserError(f"runs={query.get('runs', '')} names {len(names)} runs. It is 1 to {MOST_RUNS}. Choose fewer.")
    return names


def _x(word: str) -> X:
    if word not in get_args(X):
        raise UserError(f"x={word} is no axis. It is one of {', '.join(get_args(X))}. Choose one of these.")
    return cast(X, word)


def _number(
    query: dict[str, str], name: str, default: float | None = None, low: float = -1e18, high: float = 1e18
) -> float | None:
    if not query.get(name):
        return default
    try:
        value = float(query[name])
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise UserError(f"{name}={query[name]} is out of range. It is a number from {low:g} to {high:g}. Change it.")
    return value
