"""A peer's folder over TCP: the same bytes, refusals by name, and nothing half written."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pretrain.checkpoint.peers import Peer, PeerServer
from pretrain.errors import StoreError
from pretrain.store import Store, open_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "memory")


@pytest.fixture
def server(store: Store) -> Iterator[PeerServer]:
    server = PeerServer(store, "secret", "127.0.0.1")
    yield server
    server.close()


@pytest.fixture
def open_peer(server: PeerServer) -> Iterator[Callable[..., Peer]]:
    opened: list[Peer] = []

    def call(token: str = "secret", address: str = "") -> Peer:
        opened.append(Peer(address or server.address, token))
        return opened[-1]

    yield call
    for peer in opened:
        peer.close()


def test_what_is_put_is_what_is_read(store: Store, server: PeerServer, open_peer) -> None:
    peer = open_peer().child("step-1")
    pieces = [memoryview(b"x" * 3_000_000), memoryview(bytes(range(256)))]
    told: list[int] = []
    peer.put("file", pieces, lambda: told.append(1))  # a slow network is no hang
    assert told == [1, 1]
    assert store.get("step-1/file") == b"".join(pieces)
    assert peer.get_range("file", 3_000_000, 256) == bytes(range(256))
    assert peer.get_range("file", 0, 2) == b"xx"


def test_what_is_not_there_is_said_and_the_connection_goes_on(store: Store, server: PeerServer, open_peer) -> None:
    peer = open_peer()
    with pytest.raises(StoreError, match=r"cannot read tcp://127\.0\.0\.1:\d+/absent: .*absent does not exist"):
        peer.get_range("absent", 0, 1)
    store.put("there", b"abc")
    with pytest.raises(StoreError, match="ends early"):
        peer.get_range("there", 2, 5)
    with pytest.raises(StoreError, match=r"cannot write tcp.*is no key of a store"):
        peer.put("../outside", [memoryview(b"x" * 2_000_000)])
    assert peer.get_range("there", 1, 2) == b"bc"


def test_who_does_not_know_the_token_gets_nothing(store: Store, server: PeerServer, open_peer) -> None:
    store.put("there", b"abc")
    with pytest.raises(StoreError, match="cannot read"):
        open_peer("guess").get_range("there", 0, 3)
    with pytest.raises(StoreError, match="cannot write"):
        open_peer("guess").put("new", [memoryview(b"abc")])
    assert store.list() == ["there"]


def test_a_sender_that_dies_leaves_no_file(store: Store, server: PeerServer, open_peer) -> None:
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b'{"token": "secret", "put": "half", "bytes": 100}\n' + b"x" * 50)
    open_peer().put("whole", [memoryview(b"abc")])
    assert store.list() == ["whole"]


def test_a_peer_that_is_gone_is_named(store: Store, server: PeerServer, open_peer) -> None:
    peer = open_peer()
    peer.put("a", [memoryview(b"abc")])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        gone = open_peer(address=f"127.0.0.1:{probe.getsockname()[1]}")
    with pytest.raises(StoreError, match=r"cannot read .*: .*refused.*Its node may be gone"):
        gone.get_range("a", 0, 1)
