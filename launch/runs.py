"""`list`, `status`, `logs`, `stop`: find runs, read how they stand, follow their logs, ask them to end.

Takes run directories → text. Everything is read from the directory alone; no Ray, no connection.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import datetime
from typing import Any

from launch.session import CONTROLLER_LOG
from launch.tables import print_rows
from pretrain.errors import ExitCode, RunError
from pretrain.metrics.progress import format_count
from pretrain.rundir import RunDirectory, RunStatus, home_url, list_runs
from pretrain.store import NotFoundError

ACTIVE = frozenset({"created", "running", "restarting"})
FOLLOW_EVERY_S = 0.3
QUIET_AFTER_END_S = 1.0
LOST_FOR_GOOD_S = 30.0  # a submitted run whose driver died is started again within this time


def run_list(args: argparse.Namespace) -> int:
    """Handler of `pretrain list`."""
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
        print(json.dumps({**status.to_json(), "url": run.url}, indent=2))
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


def run_logs(args: argparse.Namespace) -> int:
    """Handler of `pretrain logs`."""
    run = RunDirectory.locate(args.run)
    if args.controller:
        return _print_key(run, CONTROLLER_LOG, follow=args.follow)
    attempt = args.attempt or _newest_logged(run, args.rank)
    if not args.follow:
        if attempt is None:
            raise RunError(
                f"run={run.name} has no log of rank {args.rank}. A rank has one once it was started. "
                f"See pretrain status {run.name}, or pretrain logs {run.name} --controller."
            )
        return _print_key(run, run.log_key(attempt, args.rank), follow=False)
    return _follow_ranks(run, args.rank, attempt, only=args.attempt is not None)


def run_stop(args: argparse.Namespace) -> int:
    """Handler of `pretrain stop`: asks, then waits for the run to end."""
    run = RunDirectory.locate(args.run)
    status = run.status()
    if _has_ended(status):
        print(f"run {run.name} is not running: it is {status.state}")
        return int(ExitCode.DONE)
    run.request_stop(now=args.now)
    print(f"asked {run.name} to {'end at once' if args.now else 'save and end'}", flush=True)
    deadline = time.monotonic() + args.timeout
    while time.monotonic() < deadline:
        status = run.status()
        if _has_ended(status):
            print(f"{status.state} at step {status.step}; go on with pretrain resume {run.name}")
            return int(ExitCode.DONE)
        time.sleep(FOLLOW_EVERY_S)
    print(
        f"error: {run.name} has not ended within --timeout={args.timeout:g} s; the request stands. "
        f"See pretrain status {run.name}, or use --now.",
        file=sys.stderr,
    )
    return int(ExitCode.FAILED)


def _has_ended(status: RunStatus) -> bool:
    """Nothing trains the run, and no keeper is about to start it again."""
    if status.state == "lost":
        return time.time() - (status.updated_at or 0.0) > LOST_FOR_GOOD_S
    return status.state not in ACTIVE


def _newest_logged(run: RunDirectory, rank: int) -> int | None:
    """The newest attempt with a log of the rank."""
    attempts = [
        int(parts[1].removeprefix("attempt-"))
        for key in run.store.list("logs")
        if len(parts := key.split("/")) == 3 and parts[2] == f"rank-{rank:05d}.log"
    ]
    return max(attempts, default=None)


class _Tail:
    """What a key of the run has grown by since the last look."""

    def __init__(self, run: RunDirectory, key: str) -> None:
        self._store, self._key, self._offset = run.store, key, 0

    def print_new(self) -> bool:
        """Prints what is new; False if nothing was."""
        try:
            size = self._store.size(self._key)
            if size <= self._offset:
                return False
            data = self._store.get_range(self._key, self._offset, size - self._offset)
        except NotFoundError:
            return False
        self._offset = size
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
        return True


def _print_key(run: RunDirectory, key: str, *, follow: bool) -> int:
    tail = _Tail(run, key)
    if not run.store.exists(key) and not follow:
        raise RunError(f"run={run.name} has no {key}. See pretrain status {run.name} for what was started.")
    tail.print_new()
    while follow and not _has_ended(run.status()):
        tail.print_new()
        time.sleep(FOLLOW_EVERY_S)
    tail.print_new()
    return int(ExitCode.DONE)


def _follow_ranks(run: RunDirectory, rank: int, attempt: int | None, *, only: bool) -> int:
    """Prints a rank's log as it grows, and that of the next attempt when there is one, until the run ends."""
    tail = _Tail(run, run.log_key(attempt, rank)) if attempt else None
    ended_t: float | None = None
    while True:
        grew = tail.print_new() if tail else False
        newest = attempt if only else _newest_logged(run, rank)
        if newest is not None and newest != attempt:
            if tail:
                tail.print_new()
                print(f"--- attempt {newest} ---", flush=True)
            attempt, tail = newest, _Tail(run, run.log_key(newest, rank))
            continue
        if not _has_ended(run.status()):
            ended_t = None
        elif ended_t is None:
            ended_t = time.monotonic()  # the last lines may come a moment after the last event
        elif not grew and time.monotonic() - ended_t > QUIET_AFTER_END_S:
            return int(ExitCode.DONE)
        time.sleep(FOLLOW_EVERY_S)


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
