"""The process that measures a run's checkpoints on a slot that no rank has, as its agent holds it.

Takes orders to start and stop it -> `evaluated` with its exit code for the controller: 0 where it was stopped because
its slot is needed. At most one; it dies with its agent. Used by the agent's one thread.
"""

from __future__ import annotations

import selectors
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from launch.agents.process import Child, Tell, tail_of


class EvaluatorProcess:
    """See the module.

    Args:
        inherited: environment that every process of the agent inherits.
        selector: calls what is registered as data when a descriptor is readable.
        tell: sends a message to the controller.
    """

    def __init__(self, inherited: Mapping[str, str], selector: selectors.BaseSelector, tell: Tell) -> None:
        self._inherited, self._selector, self._tell = inherited, selector, tell
        self._child: Child | None = None
        self._log = Path()
        self._stopped = False

    def start(self, run_url: str, environment: Mapping[str, str], log: Path) -> None:
        """Starts it, unless it is there already."""
        if self._child is not None:
            return
        self._log, self._stopped = log, False
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                command = [sys.executable, "-m", "launch.evaluator", run_url]
                self._child = Child(command, {**self._inherited, **environment}, output)
        except OSError as error:
            self._tell(-1, "note", message=f"no checkpoint is measured on {socket.gethostname()}: {error}")
            self._tell(-1, "evaluated", code=1)
            return
        self._selector.register(self._child.pidfd, selectors.EVENT_READ, self._hear_end)

    def stop(self) -> None:
        """Its slot is needed: kills it, now; what it was measuring is lost and measured again."""
        self._stopped = True
        if self._child is None:
            self._tell(-1, "evaluated", code=0)
        else:
            self._child.kill()

    def close(self) -> None:
        """Kills and reaps it."""
        if self._child is not None:
            self._stopped = True
            self._child.kill()
            self._hear_end()

    def _hear_end(self) -> None:
        if self._child is None:
            return
        child, self._child = self._child, None
        self._selector.unregister(child.pidfd)
        code = child.reap()
        if code and not self._stopped:
            message = f"the process that measures checkpoints on {socket.gethostname()} ended with code {code}"
            self._tell(-1, "note", message=f"{message}. Last words:\n{tail_of(self._log)}")
        self._tell(-1, "evaluated", code=0 if self._stopped else code)
