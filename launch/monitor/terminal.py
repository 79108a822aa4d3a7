"""`pretrain watch RUN`: how a run stands, refreshed in place on a terminal; a line per news elsewhere.

Takes a `RunReader` → an app on a terminal (`watch_app`), lines elsewhere, with the facts of the run's page
(`watch_panels`, `watch_history`). Only reads the run's directory. When the app has ended, the last picture stays below.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time

from launch.monitor.facts import run_facts
from launch.monitor.reader import RunReader
from launch.monitor.watch_history import history_panels
from launch.monitor.watch_panels import clock, run_panels
from pretrain.errors import ExitCode
from pretrain.metrics.progress import format_count
from pretrain.rundir import RunDirectory


def run_watch(args: argparse.Namespace) -> int:
    """Handler of `pretrain watch`: until the run has ended, or q or Ctrl-C."""
    reader = RunReader(RunDirectory.locate(args.run))
    reader.refresh()
    picture = sys.stdout.isatty() and sys.stdin.isatty()
    try:
        if picture and reader.living and not args.once:
            from launch.monitor.watch_app import WatchApp

            WatchApp(reader, args.every).run()
        if picture or args.once:
            print("\n".join(render(reader, _width(), time.time())))
        else:
            _print_news(reader, args.every)
    except KeyboardInterrupt:  # the way to leave what goes on for hours
        pass
    return int(ExitCode.DONE)


def render(reader: RunReader, width: int, now: float) -> list[str]:
    """The panels one below the other: at most `width` characters in a line."""
    lines: list[str] = []
    facts = run_facts(reader)
    for panel in [*run_panels(reader, facts, width, now), *history_panels(facts, width, now)]:
        heading = f"── {panel.title} ".ljust(width, "─") if panel.title else ""
        lines += [heading] * bool(heading) + panel.lines + [""]
    return lines[:-1]


def _print_news(reader: RunReader, every_s: float) -> None:
    """One line for each new event and step, for files and pipes."""
    told, shown = 0, None
    while True:
        reader.refresh()
        for event in reader.events[told:]:
            fields = " ".join(f"{name}={value}" for name, value in event.fields.items() if name in _TOLD)
            print(f"{clock(event.t, time.time())} {event.kind} {fields}".rstrip(), flush=True)
        told = len(reader.events)
        status = reader.status
        if status.loss is not None and (status.attempt, status.step) != shown:
            shown = (status.attempt, status.step)
            speed = format_count(status.tokens_per_second or 0.0)
            print(f"step {status.step}/{status.total_steps}  loss {status.loss:.4f}  {speed} tokens/s", flush=True)
        if not reader.living:
            print(f"{status.name} is {status.state} at step {status.step}", flush=True)
            return
        time.sleep(every_s)


_TOLD = ("attempt", "ranks", "why", "step", "checkpoint", "cause", "rank", "message", "outcome", "reason")


def _width() -> int:
    return shutil.get_terminal_size((100, 40)).columns
