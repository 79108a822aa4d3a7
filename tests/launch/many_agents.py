"""Hundreds of agents in one process, each with ranks that do nothing but beat: what a controller must listen to.

`python -m tests.launch.many_agents HOST PORT COUNT RANKS BEAT_S`, the secret on stdin. Answers `reserve` and
`start` as agents do, then sends each rank's heartbeat every BEAT_S seconds until the controller is gone.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from typing import Any

from launch.agents.wire import Channel


class ManyAgents:
    def __init__(self, controller: tuple[str, int], secret: str, count: int, beat_s: float) -> None:
        self.selector, self.beat_s = selectors.DefaultSelector(), beat_s
        self.channels: dict[str, Channel] = {}
        self.ranks: dict[str, list[int]] = {}
        self.attempt, self.step = 0, 0
        for number in range(count):
            node = f"n{number}"
            channel = self.channels[node] = Channel(socket.create_connection(controller))
            hello = {"kind": "hello", "secret": secret, "node": node, "host": node, "address": "127.0.0.1", "pid": 1}
            channel.send(hello)
            self.selector.register(channel, selectors.EVENT_READ, node)

    def run(self) -> None:
        beat_t = 0.0
        while True:
            for key, _ in self.selector.select(timeout=0.02):
                channel = self.channels[key.data]
                for message in channel.receive():
                    self.obey(key.data, channel, message)
                if channel.closed:
                    return
            now = time.monotonic()
            if now - beat_t >= self.beat_s:
                beat_t = now
                self.beat()

    def obey(self, node: str, channel: Channel, message: dict[str, Any]) -> None:
        if message["kind"] == "reserve":
            channel.send({"kind": "port", "attempt": message["attempt"], "port": 1})
        elif message["kind"] == "start":
            self.attempt = message["attempt"]
            self.ranks[node] = [rank["rank"] for rank in message["ranks"]]
            for rank in self.ranks[node]:
                channel.send({"kind": "spawned", "attempt": self.attempt, "rank": rank, "process": {"pid": rank}})
        elif message["kind"] == "kill":
            for rank in self.ranks.pop(node, []):
                channel.send({"kind": "exit", "attempt": self.attempt, "rank": rank, "code": -9, "tail": ""})

    def beat(self) -> None:
        self.step += 1
        lines = [
            {"phase": phase, "step": self.step, "collective": 3 * self.step, "t": time.time()}
            for phase in ("data", "step")
        ]
        for node, channel in self.channels.items():
            for rank in self.ranks.get(node, []):
                channel.send({"kind": "lines", "attempt": self.attempt, "rank": rank, "lines": lines})
            if not self.ranks.get(node):
                channel.send({"kind": "alive"})


if __name__ == "__main__":
    host, port, count, beat_s = sys.argv[1:]
    ManyAgents((host, int(port)), json.loads(sys.stdin.readline()), int(count), float(beat_s)).run()
