"""Start: from typing `pretrain train` or `pretrain submit` to the first finished step of the smallest model, by phase.

Phases: `ready` is config, run directory and, of `train`, the local Ray; `ranks` the start of the rank processes;
then the stages of rank 0. A submitted run goes to a cluster that `pretrain cluster up` has brought up, of two
nodes with a slot each; `submit` is the time until the command returns, `status` that of asking for the run's state.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.result import Result, median
from benchmarks.tiny_run import TinyRun, environment_of, prepare, tiny_words, training

_SETTINGS = ("schedule.total_steps=1e6", "checkpoint.every_steps=1000000", "cluster.standbys=false")
_WAIT_S = 120.0


def _phases(run: TinyRun) -> dict[str, float]:
    """Seconds of each phase up to the first finished step."""
    (first, *_) = run.wait_for("first step", lambda: run.steps(1), _WAIT_S)
    (trained,) = run.wait_for("stages of the start", lambda: run.events("training"), _WAIT_S)
    (attempt,) = run.events("attempt_started")
    (ranks,) = run.events("ranks_started")
    return {
        "to_first_step_s": first["t"] - run.started,
        "ready_s": attempt.t - run.started,
        "ranks_s": ranks.t - attempt.t,
        **trained.fields["stages"],
    }


def _train(folder: Path, repetitions: int, command: str) -> list[Result]:
    starts = []
    for _ in range(repetitions):
        with training(folder, *_SETTINGS) as run:
            starts.append(_phases(run))
    return _medians("train", starts, command)


def _submit(folder: Path, repetitions: int, command: str) -> list[Result]:
    with _cluster(folder) as environment:
        starts = [_submit_once(folder / f"runs-{number}", environment) for number in range(repetitions)]
    return _medians("submit", starts, command)


def _submit_once(home: Path, environment: dict[str, str]) -> dict[str, float]:
    home.mkdir()
    environment = {**environment, **environment_of(home)}
    started = time.time()
    took = {"submit_s": _pretrain(environment, home.parent, *tiny_words("submit", *_SETTINGS), "--address", "auto")}
    run = TinyRun(home, None, started)
    phases = _phases(run)
    took["status_s"] = _pretrain(environment, home.parent, "status", run.directory().url)
    _pretrain(environment, home.parent, "stop", run.directory().url, "--now")
    return {**took, **phases}


def _medians(what: str, starts: list[dict[str, float]], command: str) -> list[Result]:
    return [
        Result(f"startup.{what}_{name}", median([start[name] for start in starts]), "s", "", None, len(starts), command)
        for name in starts[0]
    ]


@contextlib.contextmanager
def _cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of commands that use a cluster of two nodes on this machine."""
    with tempfile.TemporaryDirectory(prefix="b", dir="/tmp") as temporary:  # short: Ray's sockets lie below it
        environment = {**os.environ, **environment_of(folder), "TMPDIR": temporary}
        up = subprocess.run(
            [sys.executable, "-m", "launch.cli", "cluster", "up", "--nodes", "2"],
            env=environment, cwd=folder, capture_output=True, text=True, check=True,
        )  # fmt: skip
        pairs = [word.split("=", 1) for word in shlex.split(up.stdout) if "=" in word]
        try:
            yield {**environment, **dict(pairs)}
        finally:
            _pretrain(environment, folder, "cluster", "down")


def _pretrain(environment: dict[str, str], folder: Path, *words: str) -> float:
    """Seconds of a command of pretrain. Raises RuntimeError when it fails."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "launch.cli", *words]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return time.perf_counter() - started


PARTS = {"train": _train, "submit": _submit}


def measure_part(part: str, *, quick: bool, command: str) -> list[Result]:
    """Medians of several starts of one kind."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        return PARTS[part](folder, 2 if quick else 5, command)


def measure(*, quick: bool, command: str) -> list[Result]:
    """Both kinds."""
    return [result for part in PARTS for result in measure_part(part, quick=quick, command=command)]
