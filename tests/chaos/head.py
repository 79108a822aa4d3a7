"""The head of a run's own Ray is killed under `pretrain train`; `pretrain resume` starts the same run again."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from pretrain.rundir import RunDirectory
from tests.chaos.direct import Result
from tests.chaos.plan import SAVE_EVERY, STEPS, Trial
from tests.chaos.verdict import differences, leftovers
from tests.ranks_pool import ROOT
from tests.tiny import Tiny, steps_of

BOUND_S = 240.0
_ENDS_WITHIN_S = 45.0  # after its Ray is gone; then it is killed as well
_QUIET_S = 15.0  # from the end of the last command until nothing of it may live
_HEAD = ("gcs_server", "raylet")


def head_trials(count: int, seed: int) -> list[Trial]:
    draw = random.Random(seed + 2)
    return [
        Trial(2000 + number, f"cluster: kill head ({', '.join(_HEAD[: 1 + number % 2])})", 2, draw.random() < 0.5, (),
              bound_s=BOUND_S, tags=("kill head",))
        for number in range(count)
    ]  # fmt: skip


def run_head_trial(folder: Path, tiny: Tiny, reference: RunDirectory, trial: Trial) -> Result:
    """Trains, kills the processes of Ray's head after a few steps, resumes until the run is complete."""
    home = folder / f"trial-{trial.number:04d}"
    (home / "memory").mkdir(parents=True)
    began, problems, fired, starts = time.monotonic(), [], False, 1
    slow = {"PRETRAIN_FAULTS": str(home / "faults.json")}
    (home / "faults.json").write_text('[{"point": "step.begins", "do": "sleep:0.5", "rank": 0, "times": 12}]')
    overrides = [f"schedule.total_steps={STEPS}", f"checkpoint.every_steps={SAVE_EVERY}", "cluster.standbys=false"]
    if trial.memory:
        overrides += ["checkpoint.ram_every_steps=1", f"checkpoint.ram_directory={home / 'memory'}"]
    with _command(home, slow, "train", *tiny.decoder("name=run", *overrides)) as train:
        while train.poll() is None and time.monotonic() - began < 60 and len(_steps(home)) < SAVE_EVERY + 1:
            time.sleep(0.02)
        children = [] if train.poll() is not None else psutil.Process(train.pid).children(recursive=True)
        victims = [child for child in children if child.name().startswith(_HEAD[: 1 + trial.number % 2])]
        for victim in victims:
            victim.kill()
        fired = bool(victims) and _await(lambda: not any(_lives(victim) for victim in victims), 5.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            train.wait(_ENDS_WITHIN_S)
        if train.poll() is None:
            train.kill()
            train.wait()
    while train.returncode != 0 and starts < 4:
        starts += 1
        with _command(home, {}, "resume", "run") as train:
            with contextlib.suppress(subprocess.TimeoutExpired):
                train.wait(60.0)
            train.kill()
            train.wait()
    run = RunDirectory.locate(str(home / "run"))
    if train.returncode != 0:
        problems.append(f"ended with {train.returncode}\n{(home / 'output').read_text()[-3000:]}")
    else:
        _await(lambda: not leftovers(run, str(home), home / "memory"), _QUIET_S)
        problems += differences(reference, run, STEPS) + leftovers(run, str(home), home / "memory")
    seconds = time.monotonic() - began
    if seconds > trial.bound_s:
        problems.append(f"took {seconds:.0f} s, at most {trial.bound_s:g}")
    return Result(trial, fired, tuple(problems), starts, seconds)


@contextlib.contextmanager
def _command(home: Path, more: dict[str, str], *words: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        **os.environ,
        "PRETRAIN_HOME": str(home),
        "PRETRAIN_TRIAL": str(home),
        "OMP_NUM_THREADS": "1",
        **more,
    }
    with (home / "output").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.cli", *words], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _steps(home: Path) -> dict[int, object]:
    with contextlib.suppress(ValueError):  # a line that is being written
        return dict(steps_of(home / "run"))
    return {}


def _lives(process: psutil.Process) -> bool:
    """Who was killed and not yet waited for by its parent does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _await(what: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
