"""Trials through agents and Ray: submitted runs on one cluster that is used again and again.

takes → trials whose orders name ranks, agents, controllers and keepers; gives → results as the direct ones do. Each
run is compared with one of as many ranks that had neither agents nor faults.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from launch import cli
from pretrain.rundir import RunDirectory
from tests.chaos.direct import Result
from tests.chaos.plan import SAVE_EVERY, STEPS, Order, Trial
from tests.chaos.verdict import differences, leftovers
from tests.ranks_pool import ROOT
from tests.tiny import Tiny

BOUND_S = 150.0
_ENDED = ("completed", "failed", "stopped", "interrupted")
_QUIET_S = 15.0  # from the end of a run until nothing of it may live


def cluster_trials(count: int, seed: int) -> list[Trial]:
    """`count` trials, each kind in turn."""
    draw = random.Random(seed + 1)
    makers: list[Callable[[random.Random], tuple[str, list[Order], str]]] = [
        _kill_rank, _kill_controller, _kill_keeper, _two_ranks, _kill_rank, _kill_agent, _kill_controller, _stop_rank,
        _controller_and_keeper, _kill_rank, _rank_and_agent, _full_disk, _kill_controller, _stop_agent, _kill_standby,
        _two_ranks, _stop_controller, _kill_keeper, _kill_agent, _kill_rank,
    ]  # fmt: skip
    trials = []
    for number in range(count):
        name, orders, act = makers[number % len(makers)](draw)
        standbys = "cluster.standbys=true" if "standby" in name else "cluster.standbys=false"
        trials.append(
            Trial(1000 + number, name, 2, draw.random() < 0.5, tuple(orders), act=act, overrides=(standbys,),
                  bound_s=BOUND_S, tags=(name.removeprefix("cluster: "), *(str(o["point"]) for o in orders)))
        )  # fmt: skip
    return trials


def _kill_rank(draw: random.Random) -> tuple[str, list[Order], str]:
    point = draw.choice(["step.microstep", "step.after_update", "save.written", "store.before_rename", "step.agreed"])
    rank = draw.randrange(2)
    order: Order = {"point": point, "do": "kill", "nth": draw.randint(1, 3), "rank": rank}
    return "cluster: kill rank", [order | ({"detail": "rank-0000"} if point.startswith("store") else {})], ""


def _two_ranks(draw: random.Random) -> tuple[str, list[Order], str]:
    nth = draw.randint(2, STEPS - 1)
    orders: list[Order] = [{"point": "step.begins", "do": "kill", "nth": nth, "rank": r} for r in (0, 1)]
    return "cluster: kill two ranks", orders, ""


def _kill_agent(draw: random.Random) -> tuple[str, list[Order], str]:
    point = draw.choice(["agent.start", "agent.spawned"])
    return "cluster: kill agent", [{"point": point, "do": "kill", "process": "agent"}], ""


def _rank_and_agent(draw: random.Random) -> tuple[str, list[Order], str]:
    order: Order = {"point": "step.begins", "do": "kill:parent", "nth": draw.randint(2, STEPS - 1),
                    "rank": draw.randrange(2)}  # fmt: skip
    return "cluster: kill rank and agent", [order], ""


def _kill_controller(draw: random.Random) -> tuple[str, list[Order], str]:
    point, nth = draw.choice([("controller.look", 40), ("controller.look", 90), ("controller.start", 1),
                              ("journal.before", 3), ("journal.after", 4)])  # fmt: skip
    orders: list[Order] = [{"point": point, "do": "kill", "nth": nth, "process": "controller"}]
    if point == "controller.look":  # long enough to be met
        orders.append({"point": "step.begins", "do": "sleep:1", "rank": 0, "times": STEPS})
    return "cluster: kill controller", orders, ""


def _kill_keeper(draw: random.Random) -> tuple[str, list[Order], str]:
    return "cluster: kill keeper", [{"point": "keeper.look", "do": "kill", "nth": 2, "process": "keeper"}], ""


def _controller_and_keeper(draw: random.Random) -> tuple[str, list[Order], str]:
    orders: list[Order] = [
        {"point": "keeper.look", "do": "kill", "nth": 4, "process": "keeper"},
        {"point": "controller.look", "do": "kill", "nth": 50, "process": "controller"},
        {"point": "step.begins", "do": "sleep:1", "rank": 0, "times": STEPS},
    ]
    return "cluster: kill controller and keeper", orders, ""


def _stop_rank(draw: random.Random) -> tuple[str, list[Order], str]:
    order: Order = {"point": "step.microstep", "do": "stop", "nth": 14, "rank": draw.randrange(2)}
    return "cluster: stop rank", [order], ""


def _stop_agent(draw: random.Random) -> tuple[str, list[Order], str]:
    return "cluster: stop agent", [{"point": "agent.spawned", "do": "stop", "process": "agent"}], ""


def _stop_controller(draw: random.Random) -> tuple[str, list[Order], str]:
    orders: list[Order] = [
        {"point": "controller.look", "do": "stop", "nth": 50, "process": "controller"},
        {"point": "step.begins", "do": "sleep:1", "rank": 0, "times": 2 * STEPS},
    ]
    return "cluster: stop controller, continue it later", orders, "take over and continue"


def _full_disk(draw: random.Random) -> tuple[str, list[Order], str]:
    order: Order = {"point": "store.mid_write", "do": "error:ENOSPC", "detail": "journal/", "process": "controller",
                    "nth": draw.randint(2, 4), "times": 3}  # fmt: skip
    return "cluster: full disk under the journal", [order], ""


def _kill_standby(draw: random.Random) -> tuple[str, list[Order], str]:
    orders: list[Order] = [
        {"point": "step.begins", "do": "kill", "nth": STEPS - 1, "rank": draw.randrange(2)},
        {"point": "standby.taken", "do": "kill", "process": "standby"},
        {"point": "step.begins", "do": "sleep:4", "rank": 0, "times": STEPS - 3},  # until there are standbys
    ]
    return "cluster: kill standby as it is taken", orders, ""


class ClusterBench:
    """A context manager: the cluster lives as long as it.

    Args:
        reference: an untouched run of two ranks.
    """

    def __init__(self, folder: Path, tiny: Tiny, reference: RunDirectory) -> None:
        self._folder, self._tiny, self._reference = folder, tiny, reference
        self._plan = folder / "cluster-faults.json"
        self._mark = str(folder / "cluster")

    def __enter__(self) -> ClusterBench:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), RAY_USAGE_STATS_ENABLED="0")
        self._ray = tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True)
        environment = {**os.environ, "PRETRAIN_FAULTS": str(self._plan), "PRETRAIN_TRIAL": self._mark,
                       "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}  # fmt: skip
        with (self._folder / "ray.log").open("wb") as log:
            self._nodes = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.ray_node", self._ray.name], env=environment, cwd=ROOT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        assert self._nodes.stdout is not None
        line = self._nodes.stdout.readline()
        assert line, (self._folder / "ray.log").read_text(errors="replace")[-4000:]
        self._address = json.loads(line)["dashboard"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._nodes.stdin is not None
        self._nodes.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._nodes.wait(60.0)
        self._nodes.kill()
        assert self._nodes.stdout is not None
        self._nodes.stdout.close()
        self._ray.cleanup()

    def run(self, trial: Trial) -> Result:
        home = self._folder / f"trial-{trial.number:04d}"
        (home / "memory").mkdir(parents=True)
        for old in self._folder.glob("cluster-faults.json*"):
            old.unlink()
        self._plan.write_text(json.dumps(trial.orders))
        os.environ["PRETRAIN_HOME"] = str(home)
        began, problems, fenced = time.monotonic(), [], ""
        self._submit(trial, home)
        if trial.act:
            fenced = self._take_over(trial, home)
        ended = self._await(lambda: _last_event(home) in _ENDED, trial.bound_s)
        seconds = time.monotonic() - began
        fired = all(Path(f"{self._plan}.fired-{index}").exists() for index in range(len(trial.orders)))
        run = RunDirectory.locate(str(home / "run"))
        if not ended or _last_event(home) != "completed":
            tail = [f"{event.kind} {event.fields}"[:300] for event in run.events()[-12:]]
            problems.append(f"not complete within {trial.bound_s:g} s:\n" + "\n".join(tail))
            self._end(home)
        else:
            self._await(lambda: not self._left(home), _QUIET_S)
            problems += differences(self._reference, run, STEPS) + self._left(home)
        if fenced:
            problems.append(fenced)
        starts = sum(event.kind == "attempt_started" for event in run.events())
        return Result(trial, fired, tuple(problems), starts, seconds)

    def _submit(self, trial: Trial, home: Path, *more: str) -> None:
        overrides = [
            "name=run", f"schedule.total_steps={STEPS}", f"checkpoint.every_steps={SAVE_EVERY}", *trial.overrides,
            "cluster.num_ranks=2",
        ]  # fmt: skip
        if trial.memory:
            overrides += ["checkpoint.ram_every_steps=1", f"checkpoint.ram_directory={home / 'memory'}"]
        words = ["submit", *self._tiny.decoder(*overrides), "--address", self._address, *more]
        code = cli.main(words)
        assert code == 0, f"submit ended with {code}"

    def _take_over(self, trial: Trial, home: Path) -> str:
        """The stopped controller's run goes to a new one; then the old one goes on, and must publish nothing."""
        assert self._await(lambda: Path(f"{self._plan}.fired-0").exists(), 60.0), "the controller was not stopped"
        stopped = int(json.loads(Path(f"{self._plan}.fired-0").read_text())["pid"])
        time.sleep(12.0)  # its agents give it up after 10 s
        self._submit(trial, home, "--resume", "auto", "--takeover")
        run = RunDirectory.locate(str(home / "run"))
        self._await(lambda: len({event.lease for event in run.events()}) > 1, 60.0)
        written = list((home / "run" / "journal" / "000001").iterdir())
        os.kill(stopped, signal.SIGCONT)
        gone = self._await(lambda: not _lives(stopped), 20.0)
        more = [path for path in (home / "run" / "journal" / "000001").iterdir() if path not in written]
        return "" if gone and not more else f"the fenced controller lives: {not gone}, wrote {more}"

    def _left(self, home: Path) -> list[str]:
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                ours = str(home / "run") in words or ("--standby" in words and "pretrain" in words)
                if ours and process.environ().get("PRETRAIN_TRIAL") == self._mark:
                    processes.append(f"process {process.pid} {' '.join(words)[:120]}")
        return processes + leftovers(RunDirectory.locate(str(home / "run")), str(home), home / "memory")

    def _end(self, home: Path) -> None:
        with contextlib.suppress(BaseException):
            cli.main(["stop", "run", "--now"])
        self._await(lambda: not self._left(home), _QUIET_S)

    @staticmethod
    def _await(what: Callable[[], Any], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if what():
                return True
            time.sleep(0.1)
        return False


def _last_event(home: Path) -> str:
    with contextlib.suppress(Exception):
        events = RunDirectory.locate(str(home / "run")).events()
        return events[-1].kind if events else ""
    return ""


def _lives(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
