"""Processes as their agent holds them: spawn, pipes, exit code; a rank is one with a number and a log.

Takes a command and its environment → a process in its own process group, with a heartbeat pipe
(process → agent) and a lifeline (agent → process; its end tells the process that the agent is gone).
The lifeline is a socket, because a standby gets its log and port through it. Spawned from the agent's one
permanent thread, because the parent-death signal that a rank asks for follows the creating thread.
Linux (pidfd). Own design (DESIGN section 7).
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
from typing import IO, Any, Protocol

TAIL_BYTES = 8000
TAIL_LINES, TRACEBACK_LINES = 15, 40
TRACEBACK = "Traceback (most recent call last)"


class Tell(Protocol):
    """Sends a message about a rank (or about the agent itself, rank -1) to the controller."""

    def __call__(self, rank: int, kind: str, /, **fields: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class RankOrder:
    """What an agent needs to start one rank.

    Attributes:
        command: what becomes a rank of this run; `arguments` follow it.
        fixed: variables that hold for every rank of the run, so that a standby can have them already.
        own: variables of this rank in this attempt.
    """

    rank: int
    command: Sequence[str]
    arguments: Sequence[str]
    fixed: Mapping[str, str]
    own: Mapping[str, str]
    log: Path

    def open_log(self) -> IO[bytes]:
        """Raises OSError."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        return self.log.open("ab")


class Child:
    """A living or ended process.

    Attributes:
        heartbeat: read end of the heartbeat pipe, non-blocking.
        heartbeat_open: the process, or a child of it, still holds the other end.
        pidfd: becomes readable when the process ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: IO[bytes],
        listener: socket.socket | None = None,
    ) -> None:
        """Spawns the process. `listener` is the socket of MASTER_PORT, inherited by rank 0.

        Raises:
            OSError: the command cannot be run.
        """
        self.heartbeat, heartbeat_end = os.pipe()
        self._lifeline, lifeline_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        inherited = [heartbeat_end, lifeline_end.fileno()]
        variables = {
            **environment,
            "PRETRAIN_HEARTBEAT_FD": str(heartbeat_end),
            "PRETRAIN_LIFELINE_FD": str(lifeline_end.fileno()),
        }
        if listener is not None:
            inherited.append(listener.fileno())
            variables["PRETRAIN_MASTER_FD"] = str(listener.fileno())
        try:
            self._process = subprocess.Popen(
                list(command),
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=inherited,
                start_new_session=True,
            )
        except OSError:
            os.close(self.heartbeat)
            self._lifeline.close()
            raise
        finally:
            os.close(heartbeat_end)
            lifeline_end.close()
        os.set_blocking(self.heartbeat, False)
        self._lifeline.setblocking(False)
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.heartbeat_open = True
        self._unparsed = b""

    def say(self, word: str) -> None:
        """Sends a word down the lifeline; a process that does not read it, or is gone, misses it."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            self._lifeline.send(f"{word}\n".encode())

    def hand_over(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Sends one message with open files down the lifeline.

        Raises:
            OSError: the process is gone, does not read, or the message is too long for the socket.
        """
        socket.send_fds(self._lifeline, [json.dumps(message).encode()], list(descriptors))

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

    def signal(self, number: int) -> None:
        """Sends a signal to the process alone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to the process and all it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Exit code of the ended process (negative: signal); what it left in its group is killed first.

        The pid cannot be reused before the wait, so the group is surely its own.
        """
        self.kill()
        code = self._process.wait()
        for descriptor in (self.heartbeat, self.pidfd):
            os.close(descriptor)
        self._lifeline.close()
        return code


def spawn_rank(order: RankOrder, inherited: Mapping[str, str], listener: socket.socket | None) -> Child:
    """A new process for a rank; `listener` is the socket of MASTER_PORT for rank 0.

    Raises:
        OSError: the log cannot be opened or the command cannot be run.
    """
    with order.open_log() as output:
        command = [*order.command, *order.arguments]
        return Child(command, {**inherited, **order.fixed, **order.own}, output, listener)


def state_of(pid: int) -> str:
    """R, S, D, T or Z, as Linux tells it; empty where there is no such process."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return "T" if state == "t" else state


def size_of(log: Path) -> int:
    """Bytes of a file; 0 when there is none."""
    try:
        return log.stat().st_size
    except OSError:
        return 0


def read_from(log: Path, start: int, limit: int) -> str:
    """What was written into a file behind `start`, at most `limit` bytes."""
    try:
        with log.open("rb") as stream:
            stream.seek(start)
            return stream.read(limit).decode(errors="replace")
    except OSError:
        return ""


def tail_of(log: Path) -> str:
    """The last lines of a log file; empty when there is none."""
    try:
        with log.open("rb") as stream:
            return tail_of_stream(stream)
    except OSError:
        return ""


def tail_of_stream(stream: IO[bytes]) -> str:
    """The last lines of an open file; all of a traceback that begins before them, the first of several."""
    stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
    lines = stream.read().decode(errors="replace").splitlines()
    begins = next((number for number, line in enumerate(lines) if TRACEBACK in line), len(lines))
    lines = lines[min(begins, max(0, len(lines) - TAIL_LINES)) :]
    if len(lines) > TRACEBACK_LINES:
        half = TRACEBACK_LINES // 2
        lines = [*lines[:half], "…", *lines[-half:]]
    return "\n".join(lines)
