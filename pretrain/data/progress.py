"""Turns the ticks of tasks into `BuildProgress` for whoever shows it."""

from __future__ import annotations

import time
from collections.abc import Callable

from pretrain.data.build_report import BuildProgress


class ProgressTeller:
    """Sums ticks by phase."""

    def __init__(self, tell: Callable[[BuildProgress], None], files: int) -> None:
        self._tell, self._files = tell, files
        self._started = time.monotonic()
        self._phase, self._phase_started_s = "", 0.0
        self._total_bytes: int | None = None
        self._done = [0, 0]
        self._session = [0, 0]
        self._of_phases: dict[str, int] = {}

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def phase(self, name: str, total_bytes: int | None) -> None:
        """A new phase begins."""
        self._phase, self._total_bytes, self._phase_started_s = name, total_bytes, self.elapsed_s
        self._done, self._session = [0, 0], [0, 0]

    def tick(self, num_bytes: int, num_tokens: int) -> None:
        """So much more is done."""
        for sums in (self._done, self._session):
            sums[0] += num_bytes
            sums[1] += num_tokens
        self._of_phases[self._phase] = self._session[0]
        self._say()

    def reuse(self, num_bytes: int, num_tokens: int) -> None:
        """So much was done by an earlier build."""
        self._done[0] += num_bytes
        self._done[1] += num_tokens

    def complete(self) -> None:
        """The phase is over, however good the estimate of its total was."""
        self._total_bytes = self._done[0]
        self._say()

    def session_bytes(self, phase: str) -> int:
        """Bytes that a phase did here."""
        return self._of_phases.get(phase, 0)

    def _say(self) -> None:
        self._tell(
            BuildProgress(
                phase=self._phase,
                done_bytes=self._done[0],
                total_bytes=self._total_bytes,
                done_tokens=self._done[1],
                session_bytes=self._session[0],
                session_tokens=self._session[1],
                elapsed_s=self.elapsed_s,
                phase_started_s=self._phase_started_s,
                files=self._files,
            )
        )
