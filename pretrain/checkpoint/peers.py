"""Files of the memory tier on other nodes: read a range of one, or put one there.

takes -> a node's folder; gives -> a server thread of the node's first rank, and what other ranks ask it with. Plain
TCP between the ranks themselves: it works under torchrun as under an agent, holds no second copy in an object
store, and a peer that dies breaks one transfer and nothing else. A request is a line of JSON, then bytes:

    {"token", "get": key, "start", "length"}   ->   {"bytes": n} and n bytes, or {"error": text}
    {"token", "put": key, "bytes": n} and n bytes   ->   {"bytes": n} once the file is whole, or {"error": text}
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from pretrain.errors import PretrainError, StoreError
from pretrain.store import Store

_SILENCE_S = 20.0  # a peer that says nothing for as long is gone; below every collective's limit by default
_PIECE = 2**20
_LINE_BYTES = 4096


class PeerServer:
    """Serves a folder until it is closed; one thread per connection.

    Attributes:
        address: host:port that others reach it at.
    """

    def __init__(self, store: Store, token: str, host: str) -> None:
        handler = type("Handler", (_Handler,), {"store": store, "token": token})
        self._server = _Server((host, 0), handler)
        self.address = f"{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="memory tier", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Peer:
    """Another node's folder. Connections are kept for the next request, as many as there were requests at once.

    Attributes:
        url: for messages.
    """

    def __init__(self, address: str, token: str, folder: str = "", idle: list[_Connection] | None = None) -> None:
        self.url = f"tcp://{address}/{folder}".rstrip("/")
        self._address, self._token, self._folder = address, token, folder
        self._idle: list[_Connection] = [] if idle is None else idle

    def child(self, folder: str) -> Peer:
        """A folder in it; shares the connections."""
        return Peer(self._address, self._token, f"{self._folder}/{folder}".lstrip("/"), self._idle)

    def close(self) -> None:
        """Gives the connections up that nobody uses now."""
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly these bytes. Raises StoreError."""
        with self._connected("read", key) as connection:
            connection.ask({"token": self._token, "get": self._key(key), "start": start, "length": length})
            data = connection.stream.read(connection.answer())
            if len(data) != length:
                raise ConnectionError(f"it gave {len(data)} of {length} bytes")
            return data

    def put(self, key: str, chunks: list[memoryview], progress: Callable[[], None] = lambda: None) -> None:
        """Puts a file there, with a word of `progress` for each piece; whole or not at all. Raises StoreError."""
        with self._connected("write", key) as connection:
            size = sum(len(chunk) for chunk in chunks)
            connection.ask({"token": self._token, "put": self._key(key), "bytes": size})
            for chunk in chunks:
                connection.socket.sendall(chunk)
                progress()
            connection.answer()

    def _key(self, key: str) -> str:
        return f"{self._folder}/{key}" if self._folder else key

    def _take(self) -> _Connection:
        try:
            return self._idle.pop()
        except IndexError:
            return _Connection(self._address)

    @contextmanager
    def _connected(self, action: str, key: str) -> Iterator[_Connection]:
        """A connection; after an error nothing is known of what it would say next, so it is not used again."""
        connection: _Connection | None = None
        try:
            connection = self._take()
            yield connection
        except _RefusedError as error:
            self._idle.append(error.connection)
            raise StoreError(f"cannot {action} {self.url}/{key}: {error}") from None
        except (OSError, ValueError, KeyError) as error:
            if connection is not None:
                connection.close()
            raise StoreError(f"cannot {action} {self.url}/{key}: {error}. Its node may be gone.") from None
        else:
            self._idle.append(connection)


class _Connection:
    """A socket with a reader. Raises OSError."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=_SILENCE_S)
        self.stream: IO[bytes] = self.socket.makefile("rb")

    def ask(self, request: dict[str, Any]) -> None:
        self.socket.sendall(json.dumps(request).encode() + b"\n")

    def answer(self) -> int:
        """Bytes that follow. Raises _RefusedError with the other side's reason."""
        told = json.loads(self.stream.readline(_LINE_BYTES))
        if "error" in told:
            raise _RefusedError(self, str(told["error"]))
        return int(told["bytes"])

    def close(self) -> None:
        self.stream.close()
        self.socket.close()


class _RefusedError(Exception):
    """The other side could not do it and says why; the connection is as good as before."""

    def __init__(self, connection: _Connection, why: str) -> None:
        super().__init__(why)
        self.connection = connection


def own_address() -> str:
    """Address of this node that the ranks of the group reach: that of the route to rank 0."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A peer that dies in the middle is told of elsewhere."""


class _Handler(socketserver.StreamRequestHandler):
    store: Store
    token: str
    _unread = 0  # bytes of a file that are still to come

    def handle(self) -> None:
        while line := self.rfile.readline(_LINE_BYTES):
            request = json.loads(line)
            if not hmac.compare_digest(str(request.get("token")), self.token):
                return
            data = b""
            try:
                if "get" in request:
                    data = self.store.get_range(str(request["get"]), int(request["start"]), int(request["length"]))
                    told: dict[str, Any] = {"bytes": len(data)}
                else:
                    self._unread = int(request["bytes"])
                    told = {"bytes": self.store.put_stream(str(request["put"]), self._body())}
            except PretrainError as error:
                self._drain()
                self._say({"error": str(error)[: _LINE_BYTES // 2]})
                continue
            self._say(told)
            self.wfile.write(data)

    def _body(self) -> Iterator[bytes]:
        while self._unread:
            piece = self.rfile.read(min(self._unread, _PIECE))
            if not piece:
                raise StoreError("the sender is gone. The next copy is tried.")
            self._unread -= len(piece)
            yield piece

    def _drain(self) -> None:
        """Reads what is left of a file that could not be written: its sender listens only afterwards."""
        while self._unread and (piece := self.rfile.read(min(self._unread, _PIECE))):
            self._unread -= len(piece)

    def _say(self, body: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(body).encode() + b"\n")
