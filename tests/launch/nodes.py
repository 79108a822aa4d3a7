"""`Nodes` without Ray: an agent process per node, all on this machine; a node can be killed or frozen."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

from launch.agents.agent import SECRET_VARIABLE
from launch.controller.offers import Offer
from tests.launch.runs import ROOT


class ProcessNodes:
    address = "127.0.0.1"  # that agents have

    def __init__(self, slots: Mapping[str, int]) -> None:
        self.slots = dict(slots)
        self.leaving_s: dict[str, float] = {}
        self.doors: dict[str, tuple[str, int]] = {}
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def offers(self) -> dict[str, Offer]:
        return {
            node: Offer(0 if node in self.agents else count, socket.gethostname(), self.leaving_s.get(node))
            for node, count in self.slots.items()
        }

    def door(self, node: str) -> tuple[str, int] | None:
        return self.doors.get(node)

    def launch(self, slots: Mapping[str, int], controller: tuple[str, int], secret: str) -> None:
        for node in slots:
            words = ["-m", "launch.agents.agent", controller[0], str(controller[1]), node, self.address]
            environment = {**os.environ, SECRET_VARIABLE: secret, "PYTHONPATH": str(ROOT)}
            self.agents[node] = subprocess.Popen([sys.executable, *words], env=environment)

    def release(self, node: str) -> None:
        agent = self.agents.pop(node, None)
        if agent is not None:
            try:
                agent.wait(2.0)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()

    def kill(self, node: str) -> None:
        """The node is gone for good."""
        self.slots.pop(node)
        self.agents[node].kill()

    def freeze(self, node: str) -> None:
        """The node is cut off: nothing comes from it, no connection breaks."""
        self.slots.pop(node)
        os.kill(self.agents[node].pid, signal.SIGSTOP)
