"""The controller's end of the connections to its agents: one thread that never waits for any of them.

Takes connections that begin with the controller's secret → a queue of (agent, message). A connection
without the secret is closed unheard. Own design (DESIGN section 7).
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import queue
import selectors
import socket
import threading
import time

from launch.agents.wire import ALIVE_EVERY_S, Channel, Message

HELLO_WITHIN_S = 5.0


class Hub:
    """Listens, reads, writes, says `alive`.

    Attributes:
        address: host and port that agents connect to.
        received: (agent number, message) in order of arrival; `gone` is put when a connection ends.
    """

    def __init__(self, host: str, secret: str) -> None:
        self._secret = secret
        self._server = socket.create_server((host, 0), backlog=1024)
        self._server.setblocking(False)
        self.address: tuple[str, int] = (host, self._server.getsockname()[1])
        self.received: queue.Queue[tuple[int, Message]] = queue.Queue()
        self._channels: dict[int, Channel] = {}
        self._strangers: dict[int, Channel] = {}  # connected, no hello yet
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._wake_end, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="hub", daemon=True)
        self._thread.start()

    def send(self, agent: int, message: Message) -> None:
        """Sends to one agent; nothing happens when it is gone (`gone` tells)."""
        with self._lock:
            channel = self._channels.get(agent)
            if channel:
                channel.send(message)
        self._wake_up()

    def wake_reader(self) -> None:
        """Ends a wait for the next message with one that says nothing."""
        self.received.put((0, {"kind": "wake"}))

    def silent_s(self, agent: int) -> float:
        """Seconds since the last word of an agent; infinite when its connection is gone."""
        with self._lock:
            channel = self._channels.get(agent)
            return time.monotonic() - channel.heard_t if channel else float("inf")

    def drop(self, agent: int) -> None:
        """Closes a connection: an agent that is cut off must not come back into the run."""
        with self._lock:
            channel = self._channels.get(agent)
            if channel:
                channel.closed = True
        self._wake_up()

    def close(self) -> None:
        """Sends what is queued (briefly) and closes everything."""
        self._closed = True
        self._wake_up()
        self._thread.join(2.0)

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake, b"x")

    def _serve(self) -> None:
        said_t = 0.0
        while not self._closed:
            now = time.monotonic()
            with self._lock:
                if now - said_t >= ALIVE_EVERY_S:
                    said_t = now
                    for channel in self._channels.values():
                        channel.send({"kind": "alive"})
                self._bury_closed(now)
                channels = {**self._channels, **self._strangers}
            # Only this thread closes sockets, so waiting without the lock is safe.
            with selectors.DefaultSelector() as selector:
                selector.register(self._server, selectors.EVENT_READ, ("server", 0))
                selector.register(self._wake_end, selectors.EVENT_READ, ("wake", 0))
                for number, channel in channels.items():
                    wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.wants_write else 0)
                    selector.register(channel, wanted, ("channel", number))
                ready = selector.select(timeout=ALIVE_EVERY_S / 2)
            with self._lock:
                for key, events in ready:
                    what, number = key.data
                    self._handle(what, number, events)
        self._close_all()

    def _close_all(self) -> None:
        with self._lock:
            for channel in [*self._channels.values(), *self._strangers.values()]:
                channel.flush()
                channel.close()
            self._channels.clear()
            self._strangers.clear()
        self._server.close()
        os.close(self._wake_end)
        os.close(self._wake)

    def _handle(self, what: str, number: int, events: int) -> None:
        if what == "wake":
            os.read(self._wake_end, 4096)
        elif what == "server":
            with contextlib.suppress(OSError):
                self._strangers[next(self._numbers)] = Channel(self._server.accept()[0])
        else:
            channel = self._channels.get(number) or self._strangers[number]
            if events & selectors.EVENT_WRITE:
                channel.flush()
            if events & selectors.EVENT_READ:
                for message in channel.receive():
                    self._take(number, message)

    def _take(self, number: int, message: Message) -> None:
        if number in self._strangers:
            channel = self._strangers[number]
            secret = str(message.pop("secret", "")).encode(errors="replace")
            if message.get("kind") != "hello" or not hmac.compare_digest(secret, self._secret.encode()):
                channel.closed = True
                return
            self._channels[number] = self._strangers.pop(number)
        if not self._channels[number].closed:
            self.received.put((number, message))

    def _bury_closed(self, now: float) -> None:
        for number, channel in list(self._strangers.items()):
            if channel.closed or now - channel.heard_t > HELLO_WITHIN_S:
                channel.close()
                del self._strangers[number]
        for number, channel in list(self._channels.items()):
            if channel.closed:
                channel.close()
                del self._channels[number]
                self.received.put((number, {"kind": "gone"}))
