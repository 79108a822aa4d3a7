"""A process that has imported all that a rank needs and forks ranks on command: starts cost no imports.

takes → one JSON object per line on stdin, {"ranks", "rendezvous", "main", "arguments", "environment", "logs",
"prelude"}; gives → lines {"pids": […]} and, for each end, {"pid", "code"} (negative: a signal). Prelude and main are
"module:function".
Each rank leads a session of its own with the environment of the order, calls the prelude, and ends with main's result
for the arguments, as a started process would; rank 0 inherits the listening socket of the rendezvous. The end of
stdin kills what lives. Own design.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn


def main() -> None:
    import torch

    import pretrain.__main__  # noqa: F401
    from pretrain.train.standby import imports_of_a_rank

    torch.set_num_threads(1)
    for part in imports_of_a_rank():
        part()
    gc.freeze()
    living: dict[int, int] = {}  # pid -> pidfd
    selector = selectors.DefaultSelector()
    os.set_blocking(0, False)
    selector.register(0, selectors.EVENT_READ, None)
    unparsed = b""
    _say({"ready": os.getpid()})
    while True:
        for key, _ in selector.select():
            if key.data is not None:
                selector.unregister(key.fileobj)
                os.close(living.pop(key.data))
                _, status = os.waitpid(key.data, 0)
                _say({"pid": key.data, "code": os.waitstatus_to_exitcode(status)})
                continue
            chunk = os.read(0, 1 << 16)
            if not chunk:
                for pid in living:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                return
            *lines, unparsed = (unparsed + chunk).split(b"\n")
            for line in lines:
                pids = _fork_ranks(json.loads(line))
                for pid in pids:
                    living[pid] = os.pidfd_open(pid)
                    selector.register(living[pid], selectors.EVENT_READ, pid)
                _say({"pids": pids})


def _fork_ranks(order: dict[str, Any]) -> list[int]:
    ranks = int(order["ranks"])
    listener = socket.create_server(("127.0.0.1", 0), backlog=64) if order["rendezvous"] else None
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            _become_rank(order, rank, listener)
        pids.append(pid)
    if listener:
        listener.close()
    return pids


def _become_rank(order: dict[str, Any], rank: int, listener: socket.socket | None) -> None:
    os.setsid()
    log = os.open(order["logs"][rank], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(order["environment"])
    if listener is not None:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(order["ranks"]), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(order["ranks"]),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(listener.getsockname()[1]),
        )  # fmt: skip
        if rank == 0:
            os.environ["PRETRAIN_MASTER_FD"] = str(listener.fileno())
        else:
            listener.close()

    def run() -> int:
        if order["prelude"]:
            _function(order["prelude"])()
        return int(_function(order["main"])(order["arguments"]) or 0)

    end_as(run)


def end_as(run: Callable[[], int]) -> NoReturn:
    """Ends this process as a Python program would whose code is `run`, without the clean-up of what was forked."""
    try:
        code = run()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def _function(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _say(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
