"""`pretrain logs`: what the ranks of a run printed, one rank as it is or all of them line by line.

Takes log files of a run's directory → lines on stdout, each of a finished line of one file, printed once. With
-f across attempts until the run has ended. Only reads.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from launch.runs import FOLLOW_EVERY_S, has_ended
from launch.session import CONTROLLER_LOG
from pretrain.errors import ExitCode, RunError, UserError
from pretrain.rundir import RunDirectory
from pretrain.store import NotFoundError

QUIET_AFTER_END_S = 1.0
_COLOURS = (36, 33, 35, 32, 34, 31)


def run_logs(args: argparse.Namespace) -> int:
    """Handler of `pretrain logs`."""
    run = RunDirectory.locate(args.run)
    if args.attempt is not None and args.attempt < 1:
        raise UserError(f"--attempt={args.attempt} is wrong. The first attempt is 1. See pretrain report {run.name}.")
    if args.rank is not None and args.rank < 0:
        raise UserError(f"--rank={args.rank} is wrong. The first rank is 0. See pretrain status {run.name}.")
    if args.controller:
        return _print_controller(run, follow=args.follow)
    attempt = args.attempt or _newest_logged(run, args.rank)
    if not args.follow and (attempt is None or not _ranks_of(run, attempt, args.rank)):
        whose = "any rank" if args.rank is None else f"rank {args.rank}"
        where = f" in attempt {args.attempt}" if args.attempt else ""
        raise RunError(
            f"run={run.name} has no log of {whose}{where}. A rank has one once it was started. "
            f"See pretrain status {run.name}, or pretrain logs {run.name} --controller."
        )
    view = _View(run, args.rank, coloured=sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    if args.follow:
        _follow(run, view, attempt, rank=args.rank, only=args.attempt is not None)
    elif attempt is not None:
        view.show(attempt)
    view.finish()
    return int(ExitCode.DONE)


class _Tail:
    """What a key of the run has grown by since the last look."""

    def __init__(self, run: RunDirectory, key: str) -> None:
        self._store, self._key, self._offset = run.store, key, 0
        self.torn = b""  # a line that is not finished

    def read(self) -> bytes:
        try:
            size = self._store.size(self._key)
            if size <= self._offset:
                return b""
            data = self._store.get_range(self._key, self._offset, size - self._offset)
        except NotFoundError:
            return b""
        self._offset = size
        return data

    def read_lines(self) -> list[bytes]:
        *lines, self.torn = (self.torn + self.read()).split(b"\n")
        return lines


class _View:
    """Prints the logs of an attempt: of one rank as they are, of all with the rank before each line."""

    def __init__(self, run: RunDirectory, rank: int | None, *, coloured: bool) -> None:
        self._run, self._rank, self._coloured = run, rank, coloured
        self._attempt: int | None = None
        self._tails: dict[int, _Tail] = {}

    def show(self, attempt: int) -> bool:
        """Prints what is new in an attempt; False if nothing was."""
        if attempt != self._attempt:
            self.finish()
            if self._attempt is not None:
                print(f"--- attempt {attempt} ---", flush=True)
            self._attempt, self._tails = attempt, {}
        for rank in _ranks_of(self._run, attempt, self._rank):
            self._tails.setdefault(rank, _Tail(self._run, self._run.log_key(attempt, rank)))
        grew = [self._print_new(rank, tail) for rank, tail in sorted(self._tails.items())]
        sys.stdout.flush()
        return any(grew)

    def finish(self) -> None:
        """Prints lines that were never finished."""
        for rank, tail in sorted(self._tails.items()):
            if tail.torn:
                self._print_lines(rank, [tail.torn])
                tail.torn = b""
        sys.stdout.flush()

    def _print_new(self, rank: int, tail: _Tail) -> bool:
        if self._rank is not None:
            data = tail.read()
            sys.stdout.buffer.write(data)
            return bool(data)
        lines = tail.read_lines()
        self._print_lines(rank, lines)
        return bool(lines)

    def _print_lines(self, rank: int, lines: Sequence[bytes]) -> None:
        prefix = f"r{rank} | "
        if self._coloured:
            prefix = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{prefix}\x1b[0m"
        for line in lines:
            sys.stdout.buffer.write(prefix.encode() + line + b"\n")


def _follow(run: RunDirectory, view: _View, attempt: int | None, *, rank: int | None, only: bool) -> None:
    """Goes on until the run has ended and nothing comes any more."""
    ended_t: float | None = None
    while True:
        grew = view.show(attempt) if attempt is not None else False
        newest = attempt if only else _newest_logged(run, rank)
        if newest != attempt:
            if attempt is not None:
                view.show(attempt)
            attempt = newest
            continue
        if not has_ended(run.status()):
            ended_t = None
        elif ended_t is None:
            ended_t = time.monotonic()  # the last lines may come a moment after the last event
        elif not grew and time.monotonic() - ended_t > QUIET_AFTER_END_S:
            return
        time.sleep(FOLLOW_EVERY_S)


def _print_controller(run: RunDirectory, *, follow: bool) -> int:
    tail = _Tail(run, CONTROLLER_LOG)
    if not run.store.exists(CONTROLLER_LOG) and not follow:
        raise RunError(f"run={run.name} has no {CONTROLLER_LOG}. See pretrain status {run.name} for what was started.")
    ended = False
    while True:
        sys.stdout.buffer.write(tail.read())
        sys.stdout.flush()
        if ended or not follow:
            return int(ExitCode.DONE)
        ended = has_ended(run.status())
        time.sleep(FOLLOW_EVERY_S)


def _newest_logged(run: RunDirectory, rank: int | None) -> int | None:
    """The newest attempt with a log of the rank, or of any."""
    stems = [name.removeprefix("attempt-") for name in run.store.names("logs")]
    for attempt in sorted((int(stem) for stem in stems if stem.isdigit()), reverse=True):
        if _ranks_of(run, attempt, rank):
            return attempt
    return None


def _ranks_of(run: RunDirectory, attempt: int, rank: int | None) -> list[int]:
    """Ranks of an attempt that have a log, or the one asked for if it has."""
    folder = run.log_key(attempt, 0).rsplit("/", 1)[0]
    stems = [name.removeprefix("rank-").removesuffix(".log") for name in run.store.names(folder)]
    return sorted(int(stem) for stem in stems if stem.isdigit() and rank in (None, int(stem)))
