"""Three nodes with a memory of their own, each lost in turn: the run goes on from memory and ends bit for bit the same.

A node is an agent in a mount namespace with a tmpfs of its own, which is gone with it. Needs root (mount).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from launch.agents.agent import SECRET_VARIABLE
from pretrain.checkpoint import list_checkpoints, weights_sha256
from pretrain.config import load_config
from pretrain.rundir import RunDirectory
from tests.launch.nodes import ProcessNodes
from tests.launch.runs import ROOT
from tests.launch.test_controller import Scene
from tests.ranks import run_ranks
from tests.tiny import build_tiny, steps_of
from tests.train.rank_programs import trainings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 150


class MemoryNodes(ProcessNodes):
    """Each agent sees a tmpfs of its own at `ram`."""

    def __init__(self, slots: Mapping[str, int], ram: Path) -> None:
        super().__init__(slots)
        self._ram = ram

    def launch(self, slots: Mapping[str, int], controller: tuple[str, int], secret: str) -> None:
        for node in slots:
            words = f"-m launch.agents.agent {controller[0]} {controller[1]} {node} 127.0.0.1"
            script = f"mount -t tmpfs -o size=64m node {self._ram} && exec {sys.executable} {words}"
            environment = {**os.environ, SECRET_VARIABLE: secret, "PYTHONPATH": str(ROOT)}
            self.agents[node] = subprocess.Popen(["unshare", "--mount", "sh", "-c", script], env=environment)


class RealScene(Scene):
    """The scene of the controller's tests with real ranks."""

    command = (sys.executable, "-m", "pretrain")
    silent_s = 2.0

    def __init__(self, arguments: list[str], home: Path, nodes: MemoryNodes) -> None:
        self.config = load_config(arguments[0], arguments[1:])
        self.run, _ = RunDirectory.claim(self.config, resume="never", home=str(home))
        self.begin(nodes)


def test_each_of_three_nodes_may_be_lost_and_nothing_is(tmp_path: Path) -> None:
    tiny = build_tiny(tmp_path)
    common = (
        f"schedule.total_steps={STEPS}", "checkpoint.every_steps=1000", "cluster.num_ranks=3", "cluster.standbys=off",
        "batch.global_batch_size=6", "batch.micro_batch_size=1", "engine.zero_stage=2", "cluster.backoff_s=0.1",
    )  # fmt: skip
    untouched = {"runs": [tiny.decoder("name=untouched", *common)], "home": str(tmp_path)}
    run_ranks(trainings, ranks=3, arguments=untouched, timeout_s=300)
    ram = tmp_path / "ram"
    ram.mkdir()
    tier = ("checkpoint.ram_every_steps=2", f"checkpoint.ram_directory={ram}")
    nodes = MemoryNodes({f"n{number}": 1 for number in range(1, 7)}, ram)
    play = RealScene(tiny.decoder("name=torn", *common, *tier), tmp_path, nodes)
    try:
        for number in (1, 2, 3):
            before = max(steps_of(Path(play.run.url)), default=0)
            play.wait_for(lambda: max(steps_of(Path(play.run.url)), default=0) >= before + 12, 200.0)  # noqa: B023
            nodes.kill(f"n{number}")
            (*_, restored) = play.wait_for(lambda: len(found := play.events("restored")) == number and found, 120.0)  # noqa: B023
            assert restored.fields["tier"] == "memory", play.log.getvalue()
            assert restored.fields["step"] >= before + 8
        assert play.end(300.0).event == "completed"
    finally:
        for agent in nodes.agents.values():
            agent.kill()
        play._thread.join(20.0)
    assert len(play.events("fault")) == 3
    weights = []
    for name in ("untouched", "torn"):
        store = RunDirectory.locate(str(tmp_path / name)).checkpoints
        weights.append(weights_sha256(store, list_checkpoints(store)[0].name))
    assert weights[0] == weights[1]
    assert list(ram.iterdir()) == []
