"""Words between controller and agents: JSON lines over TCP, sent without blocking, judged by silence.

Ray carries no word after an agent has started: a pending actor call to a cut-off node does not break
within a minute (measured), a socket shows silence at once. Every connection begins with the secret of
its controller. Used by one thread each (the agent's loop, the controller's hub). Own design.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

ALIVE_EVERY_S = 0.5  # both sides say at least this often that they live
CONTROLLER_SILENT_S = 10.0  # an agent that hears nothing for this long kills its ranks
MAX_LINE_BYTES = 4 * 2**20

Message = dict[str, Any]


class Channel:
    """One connection: buffers both ways, never blocks.

    Attributes:
        heard_t: monotonic time of the last byte received.
        closed: the other side is gone, or broke the protocol.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.heard_t = time.monotonic()
        self.closed = False
        self._received = b""
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def wants_write(self) -> bool:
        return bool(self._unsent) and not self.closed

    def send(self, message: Message) -> None:
        """Queues a message and sends what the socket takes now."""
        self._unsent += json.dumps(message, separators=(",", ":")).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends as much of the queue as the socket takes; a broken connection sets `closed`."""
        while self._unsent and not self.closed:
            try:
                sent = self.socket.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.closed = True
                return
            del self._unsent[:sent]

    def receive(self) -> list[Message]:
        """Whole messages that have arrived; sets `closed` at the end of the stream or on garbage."""
        try:
            chunk = self.socket.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            chunk = b""
        if not chunk:
            self.closed = True
            return []
        self.heard_t = time.monotonic()
        *lines, self._received = (self._received + chunk).split(b"\n")
        if len(self._received) > MAX_LINE_BYTES:
            self.closed = True
        messages: list[Message] = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                self.closed = True
                break
            messages.append(message)
        return messages

    def close(self) -> None:
        self.closed = True
        self.socket.close()
