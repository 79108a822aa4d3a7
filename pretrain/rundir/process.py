"""Which process something was, and whether it still lives: pid, start time, boot and pid namespace.

A pid alone lies: it is reused. Its start time (clock ticks since boot) tells the two apart, and the
boot id with the pid namespace tells whether this process can see that pid at all: containers of one
machine share the boot id, not the pids.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrain.errors import RunError


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process, for ever.

    Attributes:
        host: name of its machine, for people.
        boot_id: boot of the kernel and pid namespace; pids compare only where this is equal.
        pid: process id in that namespace.
        start_time: clock ticks after boot at which it started (seconds where there is no /proc).
    """

    host: str
    boot_id: str
    pid: int
    start_time: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ProcessIdentity:
        """Takes what `to_json` gave; other keys are left alone. Raises KeyError or ValueError on anything else."""
        return cls(str(value["host"]), str(value["boot_id"]), int(value["pid"]), float(value["start_time"]))

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def this_process() -> ProcessIdentity:
    """The identity of the caller's process."""
    return identify_process(os.getpid())


def identify_process(pid: int) -> ProcessIdentity:
    """The identity of a process of this host that has not been waited for yet.

    Raises:
        ProcessLookupError: there is none of this pid.
    """
    found = _look(pid)
    if found is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return ProcessIdentity(socket.gethostname(), _boot_id(), pid, found.start_time)


def is_alive(identity: ProcessIdentity) -> bool | None:
    """Whether exactly that process lives; None where its pid cannot be seen from here (another host or container)."""
    if identity.boot_id != _boot_id():
        return None
    found = _look(identity.pid)
    if found is None:
        return _hidden_but_there(identity.pid)
    return found.start_time == identity.start_time and not found.dead


def is_ending(identity: ProcessIdentity) -> bool:
    """Whether a process that still lives is on its way out (killed, and the kernel is freeing what it had)."""
    found = _look(identity.pid) if identity.boot_id == _boot_id() else None
    return found is not None and found.start_time == identity.start_time and found.ending


def wait_until_gone(identities: Sequence[ProcessIdentity], timeout_s: float = 10.0) -> list[ProcessIdentity]:
    """Waits for processes of this host to end, then kills (SIGKILL) those left, with the group that they lead.

    Processes that cannot be seen from here, and the caller's own, are left alone. Gives those that had to be killed.

    Raises:
        RunError: one survives even that (stuck in the kernel, or another user's).
    """
    left = _wait([identity for identity in identities if identity != this_process()], timeout_s)
    for identity in left:
        _kill(identity)
    stuck = _wait(left, 5.0) if left else []
    if stuck:
        raise RunError(
            f"{', '.join(str(identity) for identity in stuck)} cannot be killed. Processes of an earlier attempt "
            "must be gone before the next one starts. End them (as root if need be) and try again."
        )
    return left


def _wait(identities: Sequence[ProcessIdentity], timeout_s: float) -> list[ProcessIdentity]:
    deadline = time.monotonic() + timeout_s
    while True:
        left = [identity for identity in identities if is_alive(identity)]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.02)


def _kill(identity: ProcessIdentity) -> None:
    # The pid is held open while it is compared and killed, so that a reused one is never hit.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        descriptor = os.pidfd_open(identity.pid) if hasattr(os, "pidfd_open") else None
        try:
            if not is_alive(identity):
                return
            if os.getpgid(identity.pid) == identity.pid:
                os.killpg(identity.pid, signal.SIGKILL)
            elif descriptor is not None:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            else:
                os.kill(identity.pid, signal.SIGKILL)
        finally:
            if descriptor is not None:
                os.close(descriptor)


_PF_EXITING = 0x4  # include/linux/sched.h


@dataclass(frozen=True, slots=True)
class _Found:
    start_time: float
    dead: bool  # a zombie runs nothing any more; only its parent has not looked yet
    ending: bool = False


def _look(pid: int) -> _Found | None:
    if not os.path.isdir("/proc/self"):
        return _look_without_proc(pid)
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The name in parentheses may hold anything, spaces and parentheses too: fields count from its end.
    fields = text[text.rindex(")") + 2 :].split()
    ending = bool(int(fields[6]) & _PF_EXITING)
    return _Found(start_time=float(fields[19]), dead=fields[0] in "ZXx", ending=ending)


def _look_without_proc(pid: int) -> _Found | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return _Found(process.create_time(), process.status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return None


def _hidden_but_there(pid: int) -> bool:
    """A process that /proc does not show may be another user's (mount option hidepid): then it counts as alive."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return _look(pid) is not None


def _boot_id() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        import psutil

        return f"{socket.gethostname()}/{psutil.boot_time():.0f}"
