"""Outlives a `pretrain train` that was killed, for a second: ends what is left of its Ray, removes its folder.

Started by `local` with the owner's pipe as stdin: `done` means that the owner cleaned up itself, an end
without it that the owner is dead. Ray's own processes die with their parent, but its two agents wait
half a minute for a control service that is dead too (measured). They are known by the logs that they
hold open in the folder, and by what they are: whoever reads along there is left alone. Standard library only: it starts
in 20 ms and holds 10 MB. Linux (/proc).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time

GIVE_UP_AFTER_S = 10.0


def main() -> None:
    """`guard.py FOLDER`."""
    if sys.stdin.buffer.read() == b"done":
        return
    folder = sys.argv[1]
    deadline = time.monotonic() + GIVE_UP_AFTER_S
    while (found := [pid for pid in users_of(folder) if _is_ray(pid)]) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def users_of(folder: str) -> list[int]:
    """Living processes, other than this one, with an open file below the folder."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    return [pid for pid in pids if _holds_open(f"/proc/{pid}/fd", f"{folder}/")]


def _is_ray(pid: int) -> bool:
    """Whether a process is Ray's or was started by one that is."""
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/comm", "rb") as name:
            if name.read().startswith((b"ray", b"gcs_server")):  # titles, which overwrite the environment
                return True
        with open(f"/proc/{pid}/environ", "rb") as variables:
            return b"RAY_RAYLET_PID=" in variables.read()
    return False


def _holds_open(descriptors: str, prefix: str) -> bool:
    with contextlib.suppress(OSError):  # gone meanwhile, or another user's
        for name in os.listdir(descriptors):
            with contextlib.suppress(OSError):
                if os.readlink(f"{descriptors}/{name}").startswith(prefix):
                    return True
    return False


if __name__ == "__main__":
    main()
