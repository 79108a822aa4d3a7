"""The agent of a node: starts rank processes, passes their heartbeats and exit codes on, kills them.

Takes orders of the controller over TCP (reserve, start, standby, evaluate, word, kill, bye) → sends port, spawned,
lines, exit, standbys, evaluated, note, failed. One thread does everything, because ranks die with the thread that
spawned them. Invariants: the exit of a rank is on its way to the controller within milliseconds (pidfd); when the
controller is gone, or silent for 10 s, every process is killed and the agent ends. Own design (DESIGN
section 7).
"""

from __future__ import annotations

import argparse
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

import pretrain
from launch.agents.evaluator import EvaluatorProcess
from launch.agents.process import RankOrder
from launch.agents.ranks import Ranks
from launch.agents.spool import LogSpool
from launch.agents.standbys import StandbyOrder, Standbys
from launch.agents.wire import ALIVE_EVERY_S, CONTROLLER_SILENT_S, Channel, Message
from pretrain.faults import arm, passing
from pretrain.store import open_store

THIS_PYTHON = "{python}"  # stands in a rank's command for the interpreter that the agent runs on
SECRET_VARIABLE = "PRETRAIN_AGENT_SECRET"


class Agent:
    """Serves one controller until it says bye or is gone.

    Args:
        controller: host and port that the controller listens on.
        secret: what the controller knows its agents by.
        node: name of this node in the controller's table.
        address: IP address of this node that other nodes reach.
    """

    def __init__(self, controller: tuple[str, int], secret: str, node: str, address: str) -> None:
        self._controller, self._secret = controller, secret
        self._node, self._address = node, address
        self._attempt = 0
        self._listener: socket.socket | None = None
        self._spool: LogSpool | None = None
        self._selector = selectors.DefaultSelector()
        self._said_bye = False
        inherited = rank_environment_of(os.environ, address)
        self._standbys = Standbys(inherited, self._selector, self._send)
        self._ranks = Ranks(inherited, self._standbys, self._selector, self._send)
        self._evaluator = EvaluatorProcess(inherited, self._selector, self._send)

    def run(self) -> None:
        """Connects and serves; returns when all is over. Must stay on the thread that called it."""
        arm("agent")
        self._channel = Channel(socket.create_connection(self._controller, timeout=10.0))
        hello = {"kind": "hello", "secret": self._secret, "node": self._node, "host": socket.gethostname()}
        self._channel.send({**hello, "address": self._address, "pid": os.getpid()})
        self._selector.register(self._channel, selectors.EVENT_READ)
        try:
            self._serve()
        except Exception as error:  # Ray would keep it in a file of this node, and people saw that the agent ended
            self._send(-1, "failed", message=f"{type(error).__name__}: {error}")
            raise
        finally:
            self._ranks.close()
            self._standbys.close()
            self._evaluator.close()
            if self._spool:
                self._spool.close()
            self._channel.close()
            self._selector.close()

    def _serve(self) -> None:
        said_t = looked_t = time.monotonic()
        while not self._channel.closed and not self._said_bye:
            now = time.monotonic()
            if now - said_t >= ALIVE_EVERY_S:
                self._channel.send({"kind": "alive"})
                said_t = now
            if now - looked_t > 2.0:
                self._channel.heard_t = now  # this process itself slept; the words that came meanwhile are unread
            elif now - self._channel.heard_t > CONTROLLER_SILENT_S:
                return
            looked_t = now
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._channel.wants_write else 0)
            self._selector.modify(self._channel, wanted)
            for key, events in self._selector.select(timeout=ALIVE_EVERY_S / 2):
                if key.fileobj is self._channel:
                    self._talk(events)
                else:
                    hear: Callable[[], None] = key.data
                    hear()
            self._ranks.check()
            self._standbys.check()

    def _talk(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._channel.flush()
        if events & selectors.EVENT_READ:
            for message in self._channel.receive():
                self._obey(message)

    def _obey(self, message: Message) -> None:
        match message.get("kind"):
            case "reserve":
                self._reserve(message)
            case "start":
                self._start(message)
            case "standby":
                order = StandbyOrder(int(message["count"]), _command(message), message["environment"])
                self._standbys.want(order)
            case "evaluate" if message["run"] is None:
                self._evaluator.stop()
            case "evaluate":
                self._evaluator.start(str(message["run"]), message["environment"], self._log_of(message))
            case "word":
                self._ranks.say(str(message["word"]))
            case "stacks":
                self._ranks.ask_stacks()
            case "kill":
                self._ranks.kill()
            case "bye":
                self._said_bye = True

    def _reserve(self, message: Message) -> None:
        """Listens on a free port for rank 0, which inherits the socket: nobody can take the port in between."""
        if self._listener:
            self._listener.close()
        self._listener = socket.create_server((self._address, 0), backlog=1024)
        port = self._listener.getsockname()[1]
        self._channel.send({"kind": "port", "attempt": message["attempt"], "port": port})

    def _start(self, message: Message) -> None:
        self._attempt = int(message["attempt"])
        passing("agent.start")
        self._standbys.rest()
        orders = [
            RankOrder(
                rank=int(rank["rank"]),
                command=_command(message),
                arguments=message["arguments"],
                fixed=message["environment"],
                own=rank["environment"],
                log=self._log_of(rank),
            )
            for rank in message["ranks"]
        ]
        listener, self._listener = self._listener, None
        self._ranks.start(orders, listener)

    def _log_of(self, order: Mapping[str, Any]) -> Path:
        if order["log"] is not None:
            return Path(order["log"])
        if self._spool is None:
            self._spool = LogSpool(lambda url, key, data: open_store(url).put(key, data))
        return self._spool.add(order["log_url"], order["log_key"])

    def _send(self, rank: int, kind: str, /, **fields: Any) -> None:
        if kind == "exit" and self._spool:
            self._spool.flush()
        self._channel.send({"kind": kind, "attempt": self._attempt, "rank": rank, **fields})


def _command(message: Message) -> list[str]:
    return [sys.executable if word == THIS_PYTHON else word for word in message["command"]]


def rank_environment_of(environ: Mapping[str, str], address: str) -> dict[str, str]:
    """What a rank inherits from its agent: all but Ray's variables, the way to the code, the network to talk over.

    Without a named interface gloo looks the host name up, which may give the loopback or wait 10 s for
    a name server (measured).
    """
    inherited = {name: value for name, value in environ.items() if not name.startswith("RAY_")}
    inherited.pop(SECRET_VARIABLE, None)
    code = Path(pretrain.__file__).parent.parent
    if code.name not in ("site-packages", "dist-packages"):  # a checkout, or the package of a Ray job
        inherited["PYTHONPATH"] = os.pathsep.join([str(code), *filter(None, [environ.get("PYTHONPATH")])])
    interface = interface_of(address)
    if interface:
        inherited.setdefault("GLOO_SOCKET_IFNAME", interface)
        if not address.startswith("127."):
            inherited.setdefault("NCCL_SOCKET_IFNAME", interface)
    return inherited


def interface_of(address: str) -> str | None:
    """Name of the network interface that carries `address`, or None."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return None


def main() -> None:
    """An agent without Ray: `python -m launch.agents.agent HOST PORT NODE ADDRESS`, secret in the environment."""
    parser = argparse.ArgumentParser(prog="launch.agents.agent")
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("node")
    parser.add_argument("address")
    args = parser.parse_args()
    Agent((args.host, args.port), os.environ[SECRET_VARIABLE], args.node, args.address).run()


if __name__ == "__main__":
    main()
