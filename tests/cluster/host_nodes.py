"""`Nodes` without Ray over real addresses: an agent per host, started in its namespaces."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Mapping

from launch.agents.agent import SECRET_VARIABLE
from launch.controller.offers import Offer
from tests.cluster.hosts import Hosts
from tests.launch.runs import ROOT


class HostNodes:
    """One slot per host. A host that comes back is another node, as Ray has it.

    Attributes:
        agents: by node, as long as the controller has not given them up.
    """

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._numbers = itertools.count(1)
        self._host_of: dict[str, int] = {}
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self._unreachable: list[subprocess.Popen[bytes]] = []  # given up behind a cut link: nobody can end them
        self._cut: set[int] = set()
        for host in range(1, hosts.count + 1):
            self.join(host)

    def join(self, host: int) -> None:
        """A host offers its slot."""
        self._cut.discard(host)
        self._host_of[f"n{next(self._numbers)}"] = host

    def kill(self, host: int) -> None:
        self._hosts.kill(host)
        self._leave(host)

    def cut(self, host: int) -> None:
        self._hosts.cut(host)
        self._leave(host)

    def back(self, host: int) -> None:
        """After a power loss or a cut, with nothing left from before."""
        self._hosts.kill_processes(host)
        self._hosts.mend(host)
        self.join(host)

    def _leave(self, host: int) -> None:
        self._cut.add(host)
        self._host_of = {node: number for node, number in self._host_of.items() if number != host}

    def offers(self) -> dict[str, Offer]:
        return {node: Offer(int(node not in self.agents), f"node{host}") for node, host in dict(self._host_of).items()}

    def door(self, node: str) -> tuple[str, int] | None:
        return None

    def launch(self, slots: Mapping[str, int], controller: tuple[str, int], secret: str) -> None:
        for node in slots:
            host = self._host_of[node]
            words = ["-m", "launch.agents.agent", controller[0], str(controller[1]), node, self._hosts.address(host)]
            environment = {**os.environ, SECRET_VARIABLE: secret, "PYTHONPATH": str(ROOT)}
            command = [*self._hosts.inside(host), sys.executable, *words]
            self.agents[node] = subprocess.Popen(command, env=environment, cwd="/")

    def release(self, node: str) -> None:
        agent = self.agents.pop(node, None)
        if agent is None:
            return
        if node not in self._host_of:
            self._unreachable.append(agent)
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(2.0)
        agent.kill()
        agent.wait()

    def close(self) -> None:
        """After the controller has ended."""
        for agent in [*self.agents.values(), *self._unreachable]:
            agent.kill()
            agent.wait()
