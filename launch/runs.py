"""`list`, `status`, `stop`: find runs, read how they stand, ask them to end.

Takes run directories → text. Everything is read from the directory alone; no Ray, no connection.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import datetime
from typing import Any

from launch.tables import print_json, print_rows
from pretrain.errors import ExitCode, UserError
from pretrain.metrics.progress import format_count
from pretrain.rundir import RunDirectory, RunStatus, home_url, list_runs

ACTIVE = frozenset({"created", "running", "restarting"})
FOLLOW_EVERY_S = 0.3
LOST_FOR_GOOD_S = 30.0  # a submitted run whose driver died is started again within this time


def run_list(args: argparse.Namespace) -> int:
    """Handler of `pretrain list`."""
    home = home_url(args.home)
    if os.path.exists(home) and not os.path.isdir(home):
        key = "--home" if args.home else "PRETRAIN_HOME"
        raise UserError(f"{key}={home} is a file. Runs lie in a directory. Name that directory.")
    statuses = list_runs(args.home)
    if not statuses and not args.json:
        print(f"no runs in {home_url(args.home)}; start one with pretrain train CONFIG")
        return int(ExitCode.DONE)
    rows = [status.to_json() if args.json else _row(status) for status in statuses]
    print_rows(["name", "state", "step", "loss", "tok/s", "attempt", "updated", "reason"], rows, as_json=args.json)
    return int(ExitCode.DONE)


def run_status(args: argparse.Namespace) -> int:
    """Handler of `pretrain status`."""
    run = RunDirectory.locate(args.run)
    status = run.status()
    if args.json:
        print_json({**status.to_json(), "url": run.url})
        return int(ExitCode.DONE)
    total = f"/{status.total_steps}" if status.total_steps else ""
    lines = {
        "run": f"{status.name} ({run.url})",
        "state": status.state + (f" - {status.reason}" if status.reason else ""),
        "step": f"{status.step}{total}",
        "loss": None if status.loss is None else f"{status.loss:.4f}",
        "speed": None if status.tokens_per_second is None else f"{format_count(status.tokens_per_second)} tokens/s",
        "attempt": status.attempt,
        "checkpoint": status.last_checkpoint,
        "updated": _moment(status.updated_at),
    }
    for key, value in lines.items():
        print(f"{key:<11}{'-' if value is None else value}")
    return int(ExitCode.DONE)


def run_stop(args: argparse.Namespace) -> int:
    """Handler of `pretrain stop`: asks, then waits for the run to end."""
    run = RunDirectory.locate(args.run)
    status = run.status()
    if has_ended(status):
        print(f"run {run.name} is not running: it is {status.state}")
        return int(ExitCode.DONE)
    run.request_stop(now=args.now)
    print(f"asked {run.name} to {'end at once' if args.now else 'save and end'}", flush=True)
    deadline = time.monotonic() + args.timeout
    while time.monotonic() < deadline:
        status = run.status()
        if has_ended(status):
            print(f"{status.state} at step {status.step}; go on with pretrain resume {run.name}")
            return int(ExitCode.DONE)
        time.sleep(FOLLOW_EVERY_S)
    print(
        f"error: {run.name} has not ended within --timeout={args.timeout:g} s; the request stands. "
        f"See pretrain status {run.name}, or use --now.",
        file=sys.stderr,
    )
    return int(ExitCode.FAILED)


def has_ended(status: RunStatus) -> bool:
    """Nothing trains the run, and no keeper is about to start it again."""
    if status.state == "lost":
        return time.time() - (status.updated_at or 0.0) > LOST_FOR_GOOD_S
    return status.state not in ACTIVE


def _row(status: RunStatus) -> dict[str, Any]:
    total = f"/{status.total_steps}" if status.total_steps else ""
    reason = (status.reason or "").splitlines()
    return {
        "name": status.name,
        "state": status.state,
        "step": f"{status.step}{total}",
        "loss": status.loss,
        "tok/s": None if status.tokens_per_second is None else format_count(status.tokens_per_second),
        "attempt": status.attempt,
        "updated": _moment(status.updated_at),
        "reason": reason[0][:60] if reason else None,
    }


def _moment(t: float | None) -> str | None:
    return None if t is None else datetime.fromtimestamp(t).strftime("%Y-%m-%d %H:%M:%S")
