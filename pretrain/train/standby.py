"""A standby: a process that has everything imported and waits until its agent makes it a rank.

Takes one message on the lifeline (arguments, variables, the open log, for rank 0 the listening socket of
MASTER_PORT) → the arguments of a rank; the rest of its life is a rank's. Invariants: until then it holds
no port, lock, device or file of a run, and takes the CPU only where nobody else wants it; the end of the
lifeline ends it; it answers `taken` at once, also in the middle of its imports. Own design (DESIGN section 7).

Only the importing thread is at low priority. A process that has lowered its own could not raise it again
without privileges, a thread that ends needs not.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence

from pretrain.errors import ExitCode
from pretrain.faults import arm, passing
from pretrain.train.watch import Heartbeat, descriptor, die_with_parent

MAX_MESSAGE_BYTES = 1 << 20
LOWEST_PRIORITY = 19


# What a rank of any run has imported when its first step is done, in parts of at most a second or two.
_FIRST = ("torch", "torch.distributed", "torch._dynamo")
_ROOMS = ("pretrain.train.rank", "pretrain.model.decoder", "pretrain.model.encoder_decoder", "safetensors.torch")


def imports_of_a_rank() -> list[Callable[[], object]]:
    """The parts that a standby does ahead."""
    first, rooms = ([functools.partial(importlib.import_module, name) for name in names] for names in (_FIRST, _ROOMS))
    return [*first, _import_deepspeed, *rooms]


def _import_deepspeed() -> None:
    from pretrain.engine.quiet import import_ahead

    import_ahead()


def become_rank() -> list[str]:
    """The life of `python -m pretrain --standby` until it is a rank; gives the rank's arguments.

    Raises:
        UserError: no agent started it.
    """
    arm("standby")
    heartbeat = Heartbeat(descriptor("PRETRAIN_HEARTBEAT_FD"))
    return stand_by(descriptor("PRETRAIN_LIFELINE_FD"), heartbeat, imports_of_a_rank())


def stand_by(lifeline: int, heartbeat: Heartbeat, parts: Sequence[Callable[[], object]]) -> list[str]:
    """Waits to become a rank; gives the rank's arguments, environment and output in place. Main thread only.

    Args:
        lifeline: descriptor of the agent's socket; a rank goes on to read its words there.
        parts: what to do ahead, at low priority; what is left when the order comes is done at once.
    """
    die_with_parent()
    hurry = threading.Event()
    todo = list(parts)

    def work() -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        try:
            while todo and not hurry.is_set():
                todo[0]()
                del todo[0]
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(ExitCode.FAILED)
        if not todo:
            heartbeat.standby("ready")

    worker = threading.Thread(target=work, name="imports", daemon=True)
    worker.start()
    arguments = _take_order(lifeline)
    hurry.set()
    heartbeat.standby("taken")
    passing("standby.taken")
    if worker.native_id is not None:
        with contextlib.suppress(OSError):  # allowed to root only; others wait for one part at low priority
            os.setpriority(os.PRIO_PROCESS, worker.native_id, 0)
    worker.join()
    for part in todo:
        part()
    return arguments


def _take_order(lifeline: int) -> list[str]:
    """Blocks until the order is here; ends the process when the agent is gone instead."""
    with socket.socket(fileno=os.dup(lifeline)) as words:
        message, descriptors, _, _ = socket.recv_fds(words, MAX_MESSAGE_BYTES, 2)
    if not message:
        os._exit(ExitCode.FENCED)
    order = json.loads(message)
    output, *master = descriptors
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.close(output)
    os.environ.update(order["environment"])
    if master:
        os.set_inheritable(master[0], False)
        os.environ["PRETRAIN_MASTER_FD"] = str(master[0])
    return list(order["arguments"])
