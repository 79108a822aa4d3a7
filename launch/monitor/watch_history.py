"""What happened to a run, its config and its logs, as text: the other pages of `pretrain watch`. PURE, but for logs.

Takes the facts that the run's page in a browser is made of (`run_facts`) -> panels, as `watch_panels` does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from launch.monitor.facts import config_facts, log_facts
from launch.monitor.ledger import Kind
from launch.monitor.reader import RunReader
from launch.monitor.report import exact_seconds
from launch.monitor.watch_panels import Facts, Panel, clock
from launch.tables import format_table
from pretrain.errors import StoreError

TIMELINE = "timeline"
# Told apart without colours too; waits for data count as training, as in the page's timeline.
LETTERS = {
    Kind.TRAINING: "█", Kind.DATA_WAIT: "█", Kind.VALIDATION: "v", Kind.CHECKPOINT: "s", Kind.FIRST_START: "░",
    Kind.RESTART: "r", Kind.REWORK: "x", Kind.ENDING: "e", Kind.IDLE: "·", Kind.UNEXPLAINED: "?",
}  # fmt: skip
FAULT, ROLLED_BACK, SAVED = "✗", "↶", "▴"
_MOST_ROWS = 12


def history_panels(facts: Facts, width: int, now: float, *, most_rows: int = _MOST_ROWS) -> list[Panel]:
    """Timeline, attempts, restarts, changes of the config, faults and saves; of each list the newest rows."""
    panels = [
        Panel(TIMELINE, timeline_lines(facts, width, now), wraps=False),
        Panel("attempts", _attempts(facts, now, most_rows), wraps=False),
        Panel("restarts", _restarts(facts, most_rows), wraps=False),
        Panel("config changes", _changes(facts, now, most_rows)),
        Panel("faults, checkpoints, changes", _events(facts, now, most_rows)),
    ]
    return [panel.fitting(width) for panel in panels if panel.lines]


def config_panels(reader: RunReader, facts: Facts, width: int, now: float) -> list[Panel]:
    """What attempts changed, and every field as it is now."""
    fields = {name: values[0] for name, values in config_facts([reader]).items()}
    longest = max(map(len, fields), default=0)
    lines = [f"{name:<{longest}}  {_shown(value)}" for name, value in fields.items()]
    panels = [
        Panel("changes between attempts", _changes(facts, now, len(facts["attempts"]))),
        Panel("config", lines, hang=longest + 2),
    ]
    return [panel.fitting(width) for panel in panels if panel.lines]


def log_panels(reader: RunReader, facts: Facts, key: str | None, width: int) -> tuple[str | None, list[Panel]]:
    """(the log that is shown, its end): the newest of rank 0 where `key` is none or is gone."""
    keys: list[str] = facts["logs"]
    if not keys:
        return None, [Panel("logs", ["none yet"])]
    if key not in keys:
        key = next((each for each in reversed(keys) if each.endswith("rank-00000.log")), keys[-1])
    try:
        found = log_facts(reader.run.store, key)
    except StoreError as error:
        return key, [Panel(key, str(error).splitlines())]
    cut = f", the last 64 of {found['size'] / 1024:.0f} KiB" if found["start"] else ""
    title = f"{key.removeprefix('logs/')} ({keys.index(key) + 1} of {len(keys)}{cut})"
    texts = [line.expandtabs() for line in found["text"].splitlines()] or ["(empty)"]
    lines = [line[at : at + width] for line in texts for at in range(0, max(1, len(line)), width)]
    return key, [Panel(title, lines, wraps=False)]


def timeline_lines(facts: Facts, width: int, now: float) -> list[str]:
    """Marks of attempts, faults and rollbacks; a bar of what the time went to; marks of checkpoints; both ends."""
    spans = facts["timeline"]
    if not spans or width < 20:
        return []
    start, end = spans[0]["start"], spans[-1]["end"]

    def place(t: float) -> int:
        return min(width - 1, max(0, int(width * (t - start) / (end - start))))

    above, below = [" "] * width, [" "] * width
    for event in sorted(facts["events"], key=lambda event: event["kind"] == "fault"):  # of two in a place, the fault
        if event["kind"] in ("fault", "rolled_back"):
            above[place(event["t"])] = FAULT if event["kind"] == "fault" else ROLLED_BACK
    for each in facts["attempts"]:
        number, at = str(each["attempt"]), place(each["started_at"])
        while "".join(above[at : at + len(number)]).strip():  # beside the mark of the fault that it follows
            at += 1
        if at + len(number) <= width:
            above[at : at + len(number)] = number
    for each in facts["checkpoints"]:
        below[place(each["t"])] = SAVED
    kinds = _kinds(spans, width)
    legend = "  ".join(f"{LETTERS[kind]} {kind}" for kind in Kind if kind in kinds)
    marks = f"1 2 … attempts begin  {FAULT} fault  {ROLLED_BACK} rollback  {SAVED} checkpoint"
    bar = "".join(LETTERS[kind] for kind in kinds)
    begin, last = clock(start, now), clock(end, now)
    return ["".join(above).rstrip(), bar, "".join(below).rstrip(), begin.ljust(width - len(last)) + last, legend, marks]


def _kinds(spans: list[dict[str, Any]], width: int) -> list[Kind]:
    """Of each of `width` equal parts of the time, what most of it went to."""
    start, end = spans[0]["start"], spans[-1]["end"]
    part_s, at, kinds = (end - start) / width, 0, []
    for slot in range(width):
        low, high = start + slot * part_s, start + (slot + 1) * part_s
        spent: dict[Kind, float] = {}
        while at < len(spans):
            span = spans[at]
            kind = Kind(span["kind"])
            spent[kind] = spent.get(kind, 0.0) + min(high, span["end"]) - max(low, span["start"])
            if span["end"] > high or at == len(spans) - 1:
                break
            at += 1
        kinds.append(max(spent, key=lambda kind: spent[kind]))
    return kinds


def _attempts(facts: Facts, now: float, most_rows: int) -> list[str]:
    rows = []
    for each in reversed(facts["attempts"][-most_rows:]):
        last, kept = each["last_step"], each["kept_step"]
        kept = last if kept is None or last is None else min(last, kept)
        length = exact_seconds((each["ended_at"] or now) - each["started_at"])
        outcome = f"{each['outcome']}: {each['cause']}" if each["cause"] else each["outcome"]
        rows.append([each["attempt"], each["ranks"], each["host"], each["restored_step"], last, kept, length, outcome])
    head = ["#", "ranks", "on", "from step", "to step", "kept to", "time", "outcome"]
    return format_table(head, rows).splitlines() if rows else []


def _restarts(facts: Facts, most_rows: int) -> list[str]:
    restarts = facts["ledger"]["restarts"][-most_rows:]
    if not restarts:
        return []
    phases = list(restarts[0]["phases"])
    rows = []
    for each in reversed(restarts):
        spent = [_seconds(each["phases"][phase]) for phase in phases]
        sums = [exact_seconds(each["rework_s"]), exact_seconds(each["seconds"])]
        rows.append([each["attempt"], each["cause"], *spent, *sums])
    return format_table(["to attempt", "cause", *phases, "rework", "total"], rows).splitlines()


def _events(facts: Facts, now: float, most_rows: int) -> list[str]:
    return [f"{clock(event['t'], now)} {_told(event)}" for event in reversed(facts["events"][-most_rows:])]


def _told(event: Facts) -> str:
    """An event in words, as the page has them (static/panels.js)."""
    words: dict[str, Callable[[], str]] = {
        "committed": lambda: (
            f"saved {event['count']} checkpoints, {event['first']} to {event['checkpoint']}"
            if "count" in event
            else f"saved {event.get('checkpoint')}"
        ),
        "restored": lambda: f"attempt {event.get('attempt')} restored {event.get('checkpoint')}",
        "fault": lambda: f"{event.get('cause')} fault in attempt {event.get('attempt')}: {event.get('message')}",
        "rolled_back": lambda: (
            f"rolled back at step {event.get('step')} to {event.get('to_step')}, "
            f"jumps over rows {' to '.join(map(str, event.get('rows') or []))}: {event.get('why')}"
        ),
        "step_rerun": lambda: (
            f"computed step {event.get('step')} again: the fault is of the {event.get('verdict')} ({event.get('why')})"
        ),
        "straggler": lambda: (
            f"rank {event.get('rank')} on {event.get('host')} is slow: {event.get('median_s'):.4g} s of own work a "
            f"step, others {event.get('others_median_s'):.4g} s"
        ),
        "save_failed": lambda: f"save of {event.get('checkpoint')} failed: {event.get('message')}",
        "config_changed": lambda: f"config: {'; '.join(event.get('changes') or [])}",
    }
    if event["kind"] in words:
        return words[event["kind"]]()
    at = "" if event.get("step") is None else f" at step {event['step']}"
    return f"{event['kind']}{at}{': ' + str(event['reason']) if event.get('reason') else ''}"


def _changes(facts: Facts, now: float, most_rows: int) -> list[str]:
    changed = [each for each in facts["attempts"] if each["changes"]][-most_rows:]
    return [
        f"attempt {each['attempt']}, {clock(each['started_at'], now)}: {change}"
        for each in reversed(changed)
        for change in each["changes"]
    ]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _seconds(seconds: float | None) -> str | None:
    return exact_seconds(seconds) if seconds else None
