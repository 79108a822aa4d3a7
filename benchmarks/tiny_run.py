"""A real run of the smallest model on real text, started and watched from outside, for timing.

Takes the repository's own documents -> tokenizer, source and a `pretrain train` process in a folder of
its own. What the run has done is read from its directory, as `pretrain status` does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pretrain.rundir import RunDirectory

ROOT = Path(__file__).resolve().parents[1]
RUN = "timed"


class TinyRun:
    """One run's directory, and the process that trains, unless a cluster does."""

    def __init__(self, home: Path, process: subprocess.Popen[bytes] | None, started: float) -> None:
        self._home = home
        self.process = process
        self.started = started

    def directory(self) -> RunDirectory:
        return RunDirectory.locate(str(self._home / RUN))

    def events(self, kind: str) -> list[Any]:
        try:
            return [event for event in self.directory().events() if event.kind == kind]
        except Exception:  # not there yet, or being written
            return []

    def steps(self, attempt: int) -> list[dict[str, Any]]:
        """Records of finished steps of one attempt, oldest first."""
        path = self._home / RUN / "metrics" / f"attempt-{attempt:03d}.jsonl"
        if not path.exists():
            return []
        whole = path.read_text().rsplit("\n", 1)[0].splitlines()
        return [record for record in map(json.loads, whole) if "loss" in record]

    def wait_for(self, what: str, found: Callable[[], Any], timeout_s: float = 60.0) -> Any:
        """Polls until `found()` is true.

        Raises:
            RuntimeError: the run ended or the time is over; the message has the end of its output.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and (self.process is None or self.process.poll() is None):
            if value := found():
                return value
            time.sleep(0.02)
        if self.process is None:
            raise RuntimeError(f"no {what} within {timeout_s:g} s")
        raise RuntimeError(f"no {what}: the run has exit code {self.process.poll()}\n{self.output()[-2000:]}")

    def output(self) -> str:
        return (self._home / "output").read_text()


def _pretrain(*words: str, cwd: Path) -> None:
    command = [sys.executable, "-m", "launch.cli", *words]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {result.returncode}: {result.stderr[-2000:]}")


def prepare(folder: Path) -> None:
    """Tokenizer and source of the repository's documents."""
    text = [str(ROOT / "docs"), str(ROOT / "README.md")]
    _pretrain("tokenizer", "train", *text, "--vocabulary-size", "300", "--out", "tokenizer.json", cwd=folder)
    _pretrain("data", "build", *text, "--tokenizer", "tokenizer.json", "--out", "text", cwd=folder)


def tiny_words(command: str, *overrides: str) -> list[str]:
    """Arguments of `pretrain` that begin the run on the prepared source, in whose folder they are given."""
    config = str(ROOT / "configs/tests/tiny-decoder.yaml")
    return [command, config, "--name", RUN, "tokenizer=tokenizer.json", "data.sources.text.path=text", *overrides]


def environment_of(home: Path) -> dict[str, str]:
    """What commands of `pretrain` need beside the environment, with runs below `home`."""
    return {"PRETRAIN_HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@contextmanager
def training(folder: Path, *overrides: str) -> Iterator[TinyRun]:
    """A `pretrain train` of configs/tests/tiny-decoder.yaml on the prepared source; killed at the end."""
    home = folder / f"runs-{time.time_ns()}"
    home.mkdir()
    command = [sys.executable, "-m", "launch.cli", *tiny_words("train", *overrides)]
    environment = {**os.environ, **environment_of(home)}
    started = time.time()
    with (home / "output").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield TinyRun(home, process, started)
    finally:
        for _ in range(2):  # the first asks for a checkpoint, the second ends at once
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                time.sleep(0.5)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
