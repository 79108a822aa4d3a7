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
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from launch import cli
from launch.session import RANK_COMMAND_VARIABLE
from pretrain.rundir import RunDirectory
from tests.chaos.direct import Result
from tests.chaos.plan import SAVE_EVERY, STEPS, Order, Trial
from tests.chaos.verdict import differences, leftovers
from tests.ranks_pool import ROOT
from tests.tiny import Tiny

BOUND_S = 240.0
CLIENT = str(Path(__file__).with_name("rank_client.py"))
_ENDED = ("completed", "failed", "stopped", "interrupted")
_RAY_STARTS = 4  # on a busy machine Ray's dashboard is not up within the 20 s that Ray gives it
_QUIET_S = 15.0  # from the end of a run until nothing of it may live


_Fault = tuple[str, list[Order], str]


def cluster_trials(count: int, seed: int) -> list[Trial]:
    """`count` trials, each kind in turn; every point outside of ranks comes five times in forty."""
    draw = random.Random(seed + 1)
    common = [_rank_and_agent_that_hears, _rank_and_controller_that_sees, _controller_and_keeper_that_submits,
              _controller_and_keeper_at_start, _agent_twice, _standby]  # fmt: skip
    single = [_kill_rank, _two_ranks, _stop_rank, _stop_agent, _stop_controller, _both_at_once, _full_disk, _two_ranks,
              _kill_rank, _keeper]  # fmt: skip
    makers = [maker for five in range(5) for maker in (*common, *single[2 * five : 2 * five + 2])]
    trials = []
    for number in range(count):
        name, orders, act = makers[number % len(makers)](draw)
        standbys = "cluster.standbys=true" if "standby" in name else "cluster.standbys=false"
        ranks = 2 if any("rank" in order or order.get("process") == "standby" for order in orders) else 1
        trials.append(
            Trial(1000 + number, f"cluster: {name}", ranks, draw.random() < 0.5, tuple(orders), act=act,
                  overrides=(standbys,), bound_s=BOUND_S, tags=(name,))
        )  # fmt: skip
    return trials


def _of_rank(draw: random.Random) -> Order:
    point = draw.choice(["step.microstep", "step.after_update", "save.written", "store.before_rename", "step.agreed"])
    order: Order = {"point": point, "do": "kill", "nth": draw.randint(1, 3), "rank": draw.randrange(2)}
    return order | ({"detail": "rank-0000"} if point.startswith("store") else {})


def _kill_rank(draw: random.Random) -> _Fault:
    return "kill rank", [_of_rank(draw)], ""


def _two_ranks(draw: random.Random) -> _Fault:
    nth = draw.randint(2, STEPS - 1)
    return "kill two ranks", [{"point": "step.begins", "do": "kill", "nth": nth, "rank": r} for r in (0, 1)], ""


def _rank_and_agent_that_hears(draw: random.Random) -> _Fault:
    agent: Order = {"point": "agent.heard_exit", "do": "kill", "process": "agent"}
    return "kill rank, and its agent as it hears of it", [_of_rank(draw), agent], ""


def _rank_and_controller_that_sees(draw: random.Random) -> _Fault:
    controller: Order = {"point": "controller.fault", "do": "kill", "process": "controller"}
    return "kill rank, and the controller as it sees it", [_of_rank(draw), controller], ""


def _agent_twice(draw: random.Random) -> _Fault:
    orders: list[Order] = [{"point": point, "do": "kill", "process": "agent"}
                           for point in ("agent.start", "agent.spawned")]  # fmt: skip
    return "kill agent as it starts, and the next with its ranks", orders, ""


def _both_at_once(draw: random.Random) -> _Fault:
    order: Order = {"point": "step.begins", "do": "kill:parent", "nth": draw.randint(2, STEPS - 1),
                    "rank": draw.randrange(2)}  # fmt: skip
    return "kill rank and agent at once", [order], ""


def _controller_and_keeper_that_submits(draw: random.Random) -> _Fault:
    orders: list[Order] = [
        {"point": "controller.look", "do": "kill", "nth": draw.choice([40, 90]), "process": "controller"},
        {"point": "keeper.submit", "do": "kill", "process": "keeper"},
        {"point": "step.begins", "do": "sleep:1", "times": STEPS},  # long enough to be met
    ]
    return "kill controller, and the keeper as it submits", orders, ""


def _controller_and_keeper_at_start(draw: random.Random) -> _Fault:
    orders: list[Order] = [
        {"point": "keeper.look", "do": "kill", "nth": 2, "process": "keeper"},
        {"point": "controller.start", "do": "kill", "process": "controller"},
    ]
    return "kill keeper, and the controller as it starts", orders, ""


def _keeper(draw: random.Random) -> _Fault:
    orders: list[Order] = [
        {"point": "keeper.look", "do": "kill", "nth": 4, "process": "keeper"},
        {"point": draw.choice(["journal.before", "journal.after"]), "do": "kill", "nth": draw.randint(3, 5),
         "process": "controller"},
    ]  # fmt: skip
    return "kill keeper, and the controller in its journal", orders, ""


def _stop_rank(draw: random.Random) -> _Fault:
    return "stop rank", [{"point": "step.microstep", "do": "stop", "nth": 14, "rank": draw.randrange(2)}], ""


def _stop_agent(draw: random.Random) -> _Fault:
    return "stop agent", [{"point": "agent.spawned", "do": "stop", "process": "agent"}], ""


def _stop_controller(draw: random.Random) -> _Fault:
    orders: list[Order] = [
        {"point": "controller.look", "do": "stop", "nth": 50, "process": "controller"},
        {"point": "step.begins", "do": "sleep:1", "times": 2 * STEPS},
    ]
    return "stop controller, continue it later", orders, "take over and continue"


def _full_disk(draw: random.Random) -> _Fault:
    order: Order = {"point": "store.mid_write", "do": "error:ENOSPC", "detail": "journal/", "process": "controller",
                    "nth": draw.randint(2, 4), "times": 3}  # fmt: skip
    return "full disk under the journal", [order], ""


def _standby(draw: random.Random) -> _Fault:
    orders: list[Order] = [
        {"point": "step.begins", "do": "kill", "nth": STEPS - 1, "rank": draw.randrange(2)},
        {"point": "standby.taken", "do": "kill", "process": "standby"},
        {"point": "step.begins", "do": "sleep:1", "rank": 0, "times": STEPS - 3},  # until there are standbys
    ]
    return "kill standby as it is taken", orders, ""


def forks_ranks(trial: Trial) -> bool:
    """Whether the trial's ranks are forked from a process that has imported all; else agents start them as ever.

    Never where the fault is about the bond between a rank's process and its agent.
    """
    told = [str(order["do"]) for order in trial.orders]
    return not ("kill:parent" in told or "standby" in trial.name or "stop rank" in trial.name)


class ClusterBench:
    """A context manager: the cluster lives as long as it.

    Args:
        references: an untouched run for each number of ranks.
    """

    def __init__(self, folder: Path, tiny: Tiny, references: Mapping[int, RunDirectory]) -> None:
        self._folder, self._tiny, self._references = folder, tiny, references
        self._plan = folder / "cluster-faults.json"
        self._mark = str(folder / "cluster")

    def __enter__(self) -> ClusterBench:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), RAY_USAGE_STATS_ENABLED="0")
        self._ray = tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True)
        environment = {**os.environ, "PRETRAIN_FAULTS": str(self._plan), "PRETRAIN_TRIAL": self._mark,
                       "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}  # fmt: skip
        for _ in range(_RAY_STARTS):
            with (self._folder / "ray.log").open("ab") as log:
                self._nodes = subprocess.Popen(
                    [sys.executable, "-m", "tests.chaos.ray_node", self._ray.name], env=environment, cwd=ROOT,
                    text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                )  # fmt: skip
            assert self._nodes.stdout is not None
            line = self._nodes.stdout.readline()
            if line:
                break
            self._nodes.wait()
        assert line, (self._folder / "ray.log").read_text(errors="replace")[-4000:]
        self._address = json.loads(line)["dashboard"]
        self._ranks_at = str(Path(self._ray.name) / "ranks")
        self._ranks = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.rank_server", self._ranks_at], cwd=ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env={**environment, "DS_ACCELERATOR": "cpu"},
        )  # fmt: skip
        assert self._ranks.stdout is not None
        assert self._ranks.stdout.readline() == b"ready\n"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (self._nodes, self._ranks):
            assert process.stdin is not None
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._nodes.wait(60.0)
        for process in (self._nodes, self._ranks):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._ray.cleanup()
        for name in (RANK_COMMAND_VARIABLE, "PRETRAIN_HOME"):  # whoever trains next has ranks of its own
            os.environ.pop(name, None)

    def run(self, trial: Trial) -> Result:
        home = self._folder / f"trial-{trial.number:04d}"
        (home / "memory").mkdir(parents=True)
        for old in self._folder.glob("cluster-faults.json*"):
            old.unlink()
        self._plan.write_text(json.dumps(trial.orders))
        os.environ["PRETRAIN_HOME"] = str(home)
        os.environ.pop(RANK_COMMAND_VARIABLE, None)
        if forks_ranks(trial):
            os.environ[RANK_COMMAND_VARIABLE] = json.dumps([sys.executable, "-S", CLIENT, self._ranks_at])
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
            problems += differences(self._references[trial.ranks], run, STEPS) + self._left(home)
        if fenced:
            problems.append(fenced)
        starts = sum(event.kind == "attempt_started" for event in run.events())
        return Result(trial, fired, tuple(problems), starts, seconds)

    def _submit(self, trial: Trial, home: Path, *more: str) -> None:
        overrides = [
            "name=run", f"schedule.total_steps={STEPS}", f"checkpoint.every_steps={SAVE_EVERY}", *trial.overrides,
            f"cluster.num_ranks={trial.ranks}",
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
        processes += [f"process {rank.pid}, a rank" for rank in psutil.Process(self._ranks.pid).children()]
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
