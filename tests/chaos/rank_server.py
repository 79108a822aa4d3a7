"""Ranks of agents without the seconds of their imports: `python -m tests.chaos.rank_server SOCKET` forks them.

An agent starts `tests/chaos/rank_client.py SOCKET ARGUMENTS…` as its rank, which hands its arguments, environment and
open files over; what is forked here becomes the rank, `pretrain.__main__` as ever. Client and rank live and die
together: the rank's end is the client's exit code or signal, the end of the client is SIGKILL for the rank, and
signals to the client reach the rank. Own design.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any

from tests.chaos.rank_client import FILES
from tests.zygote import end_as

MESSAGE_BYTES = 1 << 18


@dataclass(slots=True)
class _Rank:
    pid: int
    pidfd: int
    client: socket.socket


def main(path: str) -> None:
    import torch

    from pretrain.__main__ import main as rank_main
    from pretrain.train.standby import imports_of_a_rank

    torch.set_num_threads(1)
    for part in imports_of_a_rank():
        part()
    gc.freeze()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, selectors.DefaultSelector() as selector:
        listener.bind(path)
        listener.listen(64)
        selector.register(listener, selectors.EVENT_READ, None)
        selector.register(0, selectors.EVENT_READ, None)
        print("ready", flush=True)
        ranks: list[_Rank] = []
        while True:
            for key, _ in selector.select():
                if key.fileobj == 0:  # stdin has ended: whoever began this is gone
                    for rank in ranks:
                        _kill(rank)
                    return
                if key.fileobj is listener:
                    rank = _take(listener, rank_main)
                    ranks.append(rank)
                    selector.register(rank.client, selectors.EVENT_READ, rank)
                    selector.register(rank.pidfd, selectors.EVENT_READ, rank)
                elif key.fileobj is key.data.client:
                    _hear(selector, key.data)
                else:
                    _bury(selector, ranks, key.data)


def _take(listener: socket.socket, rank_main: Any) -> _Rank:
    client, _ = listener.accept()
    message, files, _, _ = socket.recv_fds(client, MESSAGE_BYTES, 2 + len(FILES))
    order = json.loads(message)
    pid = os.fork()
    if pid == 0:
        client.close()
        listener.close()
        _become(order, files, rank_main)
    for descriptor in files:
        os.close(descriptor)
    return _Rank(pid, os.pidfd_open(pid), client)


def _become(order: dict[str, Any], files: list[int], rank_main: Any) -> None:
    os.setsid()
    for target, source in ((1, files[0]), (2, files[1])):
        os.dup2(source, target)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    os.environ.update({name: str(number) for name, number in zip(order["files"], files[2:], strict=True)})
    sys.argv[1:] = order["arguments"]
    end_as(lambda: int(rank_main(order["arguments"])))


def _hear(selector: selectors.BaseSelector, rank: _Rank) -> None:
    """A signal that the client got, or its end."""
    message = b""
    with contextlib.suppress(ConnectionError):
        message = rank.client.recv(16)
    if message:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, int(message))
        return
    selector.unregister(rank.client)
    _kill(rank)


def _bury(selector: selectors.BaseSelector, ranks: list[_Rank], rank: _Rank) -> None:
    selector.unregister(rank.pidfd)
    os.close(rank.pidfd)
    _, status = os.waitpid(rank.pid, 0)
    with contextlib.suppress(OSError):
        rank.client.send(str(os.waitstatus_to_exitcode(status)).encode())
    with contextlib.suppress(KeyError, ValueError):
        selector.unregister(rank.client)
    rank.client.close()
    ranks.remove(rank)


def _kill(rank: _Rank) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank.pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
