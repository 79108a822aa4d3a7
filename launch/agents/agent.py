"""The agent of a node: spawns rank processes, passes their heartbeats and exit codes on, kills them.

Takes orders of the controller over TCP (reserve, start, word, kill, bye) → sends port, spawned, lines,
exit. One thread does everything, because ranks die with the thread that spawned them. Invariants: the
exit of a rank is on its way to the controller within milliseconds (pidfd); when the controller is gone,
or silent for 10 s, every rank is killed and the agent ends. Own design (DESIGN section 7).
"""

from __future__ import annotations

import argparse
import os
import selectors
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

import pretrain
from launch.agents.process import RankOrder, RankProcess
from launch.agents.spool import LogSpool
from launch.agents.wire import ALIVE_EVERY_S, CONTROLLER_SILENT_S, Channel, Message
from pretrain.rundir import identify_process
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
        self._ranks: dict[int, RankProcess] = {}
        self._listener: socket.socket | None = None
        self._spool: LogSpool | None = None
        self._selector = selectors.DefaultSelector()
        self._said_bye = False

    def run(self) -> None:
        """Connects and serves; returns when all is over. Must stay on the thread that called it."""
        self._channel = Channel(socket.create_connection(self._controller, timeout=10.0))
        hello = {"kind": "hello", "secret": self._secret, "node": self._node, "host": socket.gethostname()}
        self._channel.send({**hello, "address": self._address, "pid": os.getpid()})
        self._selector.register(self._channel, selectors.EVENT_READ, "controller")
        try:
            self._serve()
        finally:
            for rank in self._ranks.values():
                rank.kill()
            self._await_killed()
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
            self._selector.modify(self._channel, wanted, "controller")
            for key, events in self._selector.select(timeout=ALIVE_EVERY_S / 2):
                if key.data == "controller":
                    self._talk(events)
                else:
                    self._hear_rank(*key.data)

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
            case "word":
                for rank in self._ranks.values():
                    rank.say(str(message["word"]))
            case "kill":
                for rank in self._ranks.values():
                    rank.kill()
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
        environment = rank_environment_of(os.environ, self._address)
        for rank in message["ranks"]:
            number = int(rank["rank"])
            command = [sys.executable if word == THIS_PYTHON else word for word in message["command"]]
            order = RankOrder(number, command, rank["environment"], self._log_of(rank))
            try:
                process = RankProcess(order, environment, self._listener if number == 0 else None)
            except OSError as error:
                self._send(number, "spawn_failed", message=f"rank {number} on {socket.gethostname()}: {error}")
                continue
            self._ranks[number] = process
            self._selector.register(process.heartbeat, selectors.EVENT_READ, (number, "heartbeat"))
            self._selector.register(process.pidfd, selectors.EVENT_READ, (number, "end"))
            self._send(number, "spawned", process=identify_process(process.pid).to_json())
        if self._listener:
            self._listener.close()
            self._listener = None

    def _log_of(self, rank: Mapping[str, Any]) -> Path:
        if rank["log"] is not None:
            return Path(rank["log"])
        if self._spool is None:
            self._spool = LogSpool(lambda url, key, data: open_store(url).put(key, data))
        handle, name = tempfile.mkstemp(prefix="pretrain-log-")
        os.close(handle)
        self._spool.add(Path(name), rank["log_url"], rank["log_key"])
        return Path(name)

    def _hear_rank(self, number: int, what: str) -> None:
        process = self._ranks.get(number)
        if process is None:
            return
        lines = process.read_heartbeats()
        if lines:
            self._send(number, "lines", lines=lines)
        if what == "end":
            self._bury(number, process)
        elif not process.heartbeat_open:  # its death comes through the pidfd
            self._selector.unregister(process.heartbeat)

    def _bury(self, number: int, process: RankProcess) -> None:
        registered = self._selector.get_map()
        for descriptor in (process.heartbeat, process.pidfd):
            if descriptor in registered:
                self._selector.unregister(descriptor)
        del self._ranks[number]
        code = process.reap()
        if self._spool:
            self._spool.flush()
        self._send(number, "exit", code=code, tail=process.tail())

    def _await_killed(self) -> None:
        for number, process in list(self._ranks.items()):
            self._bury(number, process)

    def _send(self, rank: int, kind: str, **fields: Any) -> None:
        self._channel.send({"kind": kind, "attempt": self._attempt, "rank": rank, **fields})


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
