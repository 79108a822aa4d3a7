"""A controller of many agents, its looks timed: for the test of its bound and the benchmark of its growth."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from launch.controller.attempt import RankSetting
from launch.controller.controller import Controller
from launch.controller.crew import Crew
from launch.controller.offers import Offer
from launch.controller.state import Cause, Limits, Phase
from pretrain.log import Log
from pretrain.rundir import Lease, RunDirectory
from tests.launch.runs import ROOT, config_for


class ManyNodes:
    """`Nodes` whose agents are all in one process."""

    def __init__(self, count: int, slots: int, beat_s: float) -> None:
        self._count, self._slots, self._beat_s = count, slots, beat_s
        self.process: subprocess.Popen[str] | None = None

    def offers(self) -> dict[str, Offer]:
        return {f"n{number}": Offer(self._slots, f"n{number}") for number in range(self._count)}

    def door(self, node: str) -> None:
        return None

    def launch(self, slots: Mapping[str, int], controller: tuple[str, int], secret: str) -> None:
        words = [
            "-m",
            "tests.launch.many_agents",
            controller[0],
            str(controller[1]),
            str(self._count),
            str(self._beat_s),
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        assert self.process.stdin is not None
        print(json.dumps(secret), file=self.process.stdin, flush=True)

    def release(self, node: str) -> None:
        pass


class NoLogs:
    def of(self, attempt: int, rank: int) -> dict[str, str | None]:
        return {"log": "/dev/null", "log_url": None, "log_key": None}


def looks(folder: Path, *, agents: int, ranks: int, beat_s: float, seconds: float) -> list[float]:
    """CPU seconds of each look of a controller's thread while all ranks train."""
    nodes = ManyNodes(agents, ranks, beat_s)
    limits = Limits(agents * ranks, agents * ranks, dict.fromkeys(Cause, 1), 0.1, 60.0, 60.0)
    run, _ = RunDirectory.claim(config_for(folder, fake={"steps": 5}), resume="auto", home=str(folder / "home"))
    times = []
    with Lease.acquire(run.store, purpose="test") as lease:
        crew = Crew(nodes, RankSetting(run.url, ["rank"], lease.token), NoLogs(), "127.0.0.1", 30.0)
        controller = Controller(run, lease, crew, limits, host="here", log=Log(stream=io.StringIO()))
        try:
            until = time.monotonic() + 60.0
            while not controller._state.trained:
                controller.look()
                assert time.monotonic() < until, "the ranks did not train"
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                began = time.thread_time()
                controller.look()
                times.append(time.thread_time() - began)
            assert controller._state.phase is Phase.RUNNING
        finally:
            crew.close()
            if nodes.process:
                nodes.process.wait(10.0)
                assert nodes.process.stdin is not None
                nodes.process.stdin.close()
    return times
