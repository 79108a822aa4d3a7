"""One rank process as its agent holds it: spawn, pipes, exit code, log.

Takes the environment of a rank → a process in its own process group, with a heartbeat pipe (rank →
agent), a lifeline pipe (agent → rank; its end tells the rank that the agent is gone) and its output in
a log file. Spawned from the agent's one permanent thread, because the parent-death signal that the rank
asks for follows the creating thread. Linux (pidfd). Own design (DESIGN section 7).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TAIL_BYTES = 4000
TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class RankOrder:
    """What an agent needs to spawn one rank."""

    rank: int
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path


class RankProcess:
    """A living or ended rank.

    Attributes:
        heartbeat: read end of the heartbeat pipe, non-blocking.
        heartbeat_open: the rank, or a child of it, still holds the other end.
        pidfd: becomes readable when the process ends.
    """

    def __init__(self, order: RankOrder, environment: Mapping[str, str], listener: socket.socket | None) -> None:
        """Spawns the process. `listener` is the socket of MASTER_PORT, inherited by rank 0.

        Raises:
            OSError: the log cannot be opened or the command cannot be run.
        """
        self.rank = order.rank
        self.log = order.log
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.heartbeat, heartbeat_end = os.pipe()
        lifeline_end, self._lifeline = os.pipe()
        inherited = [heartbeat_end, lifeline_end]
        variables = {
            **environment,
            **order.environment,
            "PRETRAIN_HEARTBEAT_FD": str(heartbeat_end),
            "PRETRAIN_LIFELINE_FD": str(lifeline_end),
        }
        if listener is not None:
            inherited.append(listener.fileno())
            variables["PRETRAIN_MASTER_FD"] = str(listener.fileno())
        try:
            with self.log.open("ab") as output:
                self._process = subprocess.Popen(
                    list(order.command),
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=inherited,
                    start_new_session=True,
                )
        except OSError:
            os.close(self.heartbeat)
            os.close(self._lifeline)
            raise
        finally:
            os.close(heartbeat_end)
            os.close(lifeline_end)
        os.set_blocking(self.heartbeat, False)
        os.set_blocking(self._lifeline, False)
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.heartbeat_open = True
        self._unparsed = b""

    def say(self, word: str) -> None:
        """Sends a word down the lifeline; a rank that does not read it, or is gone, misses it."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._lifeline, f"{word}\n".encode())

    def read_heartbeats(self) -> list[dict[str, Any]]:
        """Lines that came since the last call; a line that is no JSON object is dropped."""
        chunks = []
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.heartbeat, 1 << 16):
                chunks.append(chunk)
            self.heartbeat_open = False
        *lines, self._unparsed = (self._unparsed + b"".join(chunks)).split(b"\n")
        parsed = []
        for line in lines:
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict):
                    parsed.append(value)
        return parsed

    def kill(self) -> None:
        """SIGKILL to the rank and all it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Exit code of the ended process (negative: signal); what it left in its group is killed first.

        The pid cannot be reused before the wait, so the group is surely its own.
        """
        self.kill()
        code = self._process.wait()
        for descriptor in (self.heartbeat, self._lifeline, self.pidfd):
            os.close(descriptor)
        return code

    def tail(self) -> str:
        """The last lines of the rank's log."""
        return tail_of(self.log)


def tail_of(log: Path) -> str:
    """The last lines of a log file; empty when there is none."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = stream.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-TAIL_LINES:])
