"""`pretrain report RUN`: where the time of a run went, and what its restarts cost, as text or JSON.

Takes a `RunReader` that was refreshed → text. Everything from the run directory alone.
"""

from __future__ import annotations

import argparse
from typing import Any

from launch.monitor.attempts import Attempt
from launch.monitor.ledger import PHASES, Kind, Ledger
from launch.monitor.reader import RunReader
from launch.outputs import write_output
from launch.tables import format_table, print_json
from pretrain.errors import ExitCode, RunError
from pretrain.metrics.progress import format_count, format_duration
from pretrain.rundir import RunDirectory

BAR_WIDTH = 30


def run_report(args: argparse.Namespace) -> int:
    """Handler of `pretrain report`."""
    reader = RunReader(RunDirectory.locate(args.run))
    reader.refresh()
    if reader.problem:
        raise RunError(reader.problem)
    if args.html:
        from launch.monitor.html_report import make_html

        write_output("--html", args.html, make_html(reader))
        print(args.html)
        return int(ExitCode.DONE)
    if args.json:
        print_json(report_json(reader))
    else:
        print(format_report(reader))
    return int(ExitCode.DONE)


def report_json(reader: RunReader) -> dict[str, Any]:
    """The same facts as `format_report`, for programs."""
    return {
        "run": {**reader.status.to_json(), "url": reader.run.url},
        "ledger": reader.ledger().to_json(),
        "attempts": [attempt_json(attempt) for attempt in reader.attempts()],
        "checkpoints": checkpoints_of(reader),
        "validation": last_validations(reader),
    }


def attempt_json(attempt: Attempt) -> dict[str, Any]:
    """An attempt without its windows."""
    return {
        "attempt": attempt.number,
        "ranks": attempt.ranks,
        "host": attempt.host,
        "why": attempt.why,
        "started_at": attempt.started_t,
        "ended_at": attempt.ended_t if attempt.ended else None,
        "outcome": attempt.outcome,
        "restored_step": attempt.restored_step,
        "last_step": attempt.windows[-1].step if attempt.windows else None,
        "kept_step": attempt.kept_step,
        "cause": attempt.cause or None,
        "changes": attempt.changes,
    }


def checkpoints_of(reader: RunReader) -> list[dict[str, Any]]:
    """Every checkpoint that was committed, in order, with what is known of it now.

    `verified`: "read by attempt 3" once a restore has hashed every byte, "sizes match" while its manifest is whole and
    its files are as long as that says, "pruned" when it is gone, or what is wrong.
    """
    read = {event.fields.get("checkpoint"): event.fields.get("attempt") for event in reader.of_kind("restored")}
    there = reader.checkpoint_problems()
    rows = []
    for event in reader.of_kind("committed"):
        name = str(event.fields.get("checkpoint"))
        words = [f"read by attempt {read[name]}"] if name in read else []
        words += [there.get(name, "pruned") or ("" if words else "sizes match")]
        rows.append({"t": event.t, "tier": "durable", **event.fields, "verified": ", ".join(filter(None, words))})
    return rows


def last_validations(reader: RunReader) -> dict[str, dict[str, Any]]:
    """The newest validation of each source."""
    return {point.source: {"step": point.step, **point.values} for point in reader.validations}


def format_report(reader: RunReader) -> str:
    """The report as plain text, 80 columns or a little more."""
    status, ledger = reader.status, reader.ledger()
    total = f"/{status.total_steps}" if status.total_steps else ""
    head = f"{status.name}: {status.state} at step {status.step}{total}"
    if status.loss is not None:
        head += f", loss {status.loss:.4f}"
    if status.tokens_per_second is not None:
        head += f", {format_count(status.tokens_per_second)} tokens/s"
    parts = [head]
    if status.reason:
        parts.append(status.reason.splitlines()[0])
    for source, values in last_validations(reader).items():
        bits = values.get("bits_per_byte")
        shown = "" if bits is None else f", {bits:.4f} bits per byte"
        parts.append(f"validation {source} at step {values['step']}: loss {values.get('loss') or 0:.4f}{shown}")
    parts += ["", _format_seconds(ledger)]
    if ledger.restarts:
        parts += ["", _format_restarts(ledger), "", _format_causes(ledger)]
    attempts = reader.attempts()
    if attempts:
        parts += ["", _format_attempts(attempts)]
    changed = [f"attempt {attempt.number}: {change}" for attempt in attempts for change in attempt.changes]
    if changed:
        parts += ["", "config changed", *(f"  {line}" for line in changed)]
    return "\n".join(parts)


def _format_seconds(ledger: Ledger) -> str:
    wall_s = ledger.wall_s
    lines = [f"where {format_duration(wall_s)} went"]
    for kind in Kind:
        seconds = ledger.seconds.get(kind, 0.0)
        if seconds <= 0:
            continue
        share = seconds / wall_s
        lines.append(f"  {kind:<17}{exact_seconds(seconds):>10}  {100 * share:5.1f} %  {format_bar(share)}".rstrip())
    if ledger.goodput is not None:
        idle = ledger.seconds.get(Kind.IDLE, 0.0)
        without = f" ({100 * (ledger.busy_goodput or 0):.1f} % without idle time)" if idle > 0 else ""
        lines.append(f"  {'goodput':<27}  {100 * ledger.goodput:5.1f} %{without}")
    return "\n".join(lines)


def _format_restarts(ledger: Ledger) -> str:
    rows = []
    for restart in ledger.restarts:
        phases = [exact_seconds(restart.phases[phase]) for phase in PHASES]
        rows.append(
            [restart.attempt, restart.cause, *phases, exact_seconds(restart.rework_s), exact_seconds(restart.seconds)]
        )
    return format_table(["restart", "cause", *PHASES, "rework", "total"], rows)


def _format_causes(ledger: Ledger) -> str:
    causes: dict[str, list[float]] = {}
    for restart in ledger.restarts:
        causes.setdefault(restart.cause, []).append(restart.seconds)
    rows = [
        [cause, len(seconds), exact_seconds(sum(seconds)), exact_seconds(sum(seconds) / len(seconds))]
        for cause, seconds in sorted(causes.items(), key=lambda entry: -sum(entry[1]))
    ]
    return format_table(["cause", "restarts", "in all", "each"], rows)


def _format_attempts(attempts: list[Attempt]) -> str:
    rows = []
    for attempt in attempts:
        last = attempt.windows[-1].step if attempt.windows else None
        kept = last if attempt.kept_step is None or last is None else min(last, attempt.kept_step)
        length = exact_seconds(attempt.ended_t - attempt.started_t)
        rows.append([attempt.number, attempt.ranks, attempt.restored_step, last, kept, length, attempt.outcome])
    return format_table(["attempt", "ranks", "from step", "to step", "kept to", "time", "outcome"], rows)


def format_bar(share: float, width: int = BAR_WIDTH) -> str:
    """A bar of eighths of characters; `share` of the width, 0 to 1."""
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def exact_seconds(seconds: float) -> str:
    """Seconds as people compare them: 0.12s, 3.4s, then minutes and more."""
    if seconds < 10:
        return f"{seconds:.2f}s"
    return f"{seconds:.1f}s" if seconds < 60 else format_duration(seconds)
