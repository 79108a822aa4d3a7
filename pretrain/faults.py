"""Faults that a test orders, at named points of the product; nothing happens unless PRETRAIN_FAULTS names a file.

takes → a JSON list of orders in that file, read when a process says what it is (`arm`); gives → the fault,
at the n-th passage of its point. Before it fires, an order leaves the file `<orders>.fired-<index>`, created
exclusively: it fires once however many processes are told of it, and whether it fired is never a guess.
A point costs one comparison while nothing is ordered. Own design.

An order: {"point", "do", "nth": 1, "process": "rank", "rank": any, "attempt": any, "detail": "", "times": 1}.
`do` is kill, kill:parent (both at once), stop (SIGSTOP), sleep:SECONDS, exit:CODE or error:ERRNO (raised as OSError).
"""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

VARIABLE = "PRETRAIN_FAULTS"

# Every point by the moment that it names; a test compares this list with the calls in the source.
POINTS = frozenset(
    {
        *("start.process_group", "start.built", "standby.taken"),
        *("load.chosen", "load.verified", "load.read", "load.done"),
        *("step.begins", "step.agreed", "step.microstep", "step.before_update", "step.after_update", "step.logged"),
        *("save.copied", "save.written", "save.before_manifest", "save.after_manifest"),
        *("store.open", "store.mid_write", "store.before_fsync", "store.before_rename", "store.after_rename"),
        *("store.upload", "store.download"),
        *("journal.before", "journal.after", "lease.renew"),
        *("health.before_rollback", "health.after_rollback"),
        *("agent.start", "agent.spawned", "agent.heard_exit"),
        *("controller.look", "controller.start", "controller.fault", "keeper.look", "keeper.submit"),
    }
)


@dataclass(slots=True)
class _Order:
    point: str
    do: str
    nth: int
    times: int
    detail: str
    mark: str
    passed: int = 0
    fired: int = 0


_orders: list[_Order] | None = None
_lock = threading.Lock()


def arm(process: str, *, rank: int | None = None, attempt: int | None = None) -> None:
    """This process is one of `process` (rank, agent, controller, keeper): takes the orders that are meant for it.

    Raises:
        ValueError: an order is wrong; a test wrote it.
    """
    global _orders
    path = os.environ.get(VARIABLE)
    if not path or not os.path.exists(path):
        _orders = None
        return
    with open(path) as file:
        orders: list[dict[str, Any]] = json.load(file)
    mine = []
    for index, order in enumerate(orders):
        unknown = order.keys() - {"point", "do", "nth", "process", "rank", "attempt", "detail", "times"}
        if order["point"] not in POINTS or unknown:
            raise ValueError(f"{path}: order {index} is wrong: {order}")
        meant = (order.get("process", "rank"), order.get("rank", rank), order.get("attempt", attempt))
        if meant == (process, rank, attempt):
            counts = int(order.get("nth", 1)), int(order.get("times", 1))
            mine.append(_Order(order["point"], order["do"], *counts, order.get("detail", ""), f"{path}.fired-{index}"))
    _orders = mine or None


def passing(point: str, detail: str = "") -> None:
    """The process passes a point; `detail` says of what (the key of a file, the kind of an event)."""
    if _orders is not None:
        _pass(_orders, point, detail)


def _pass(orders: list[_Order], point: str, detail: str) -> None:
    with _lock:
        due = []
        for order in orders:
            if order.point != point or order.detail not in detail:
                continue
            order.passed += 1
            if order.nth <= order.passed and order.fired < order.times and (order.fired or _is_first(order)):
                order.fired += 1
                due.append(order.do)
    for do in due:
        _fire(do, f"{point} {detail}".strip())


def _is_first(order: _Order) -> bool:
    try:
        descriptor = os.open(order.mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        order.times = 0
        return False
    os.write(descriptor, json.dumps({"pid": os.getpid(), "t": time.time(), "point": order.point}).encode())
    os.close(descriptor)
    return True


def _fire(do: str, where: str) -> None:
    kind, _, value = do.partition(":")
    match kind:
        case "kill":
            if value == "parent":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # the signal may arrive a moment later; nothing more is done until then
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(float(value))
        case "exit":
            os._exit(int(value))
        case "error":
            number = getattr(errno, value)
            raise OSError(number, f"{os.strerror(number)} (ordered at {where})")
        case _:
            raise ValueError(f"no such fault: {do}")
