"""Output that may lose its reader: what is printed after that is dropped, and whoever prints goes on.

Ctrl-C under `pretrain train CONFIG | tee log` ends `tee` first, a closed terminal takes nothing any more,
a disk under a redirected output fills up. None of that may cost a run the checkpoint that it is saving.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast


class LastingStream:
    """A text stream that never fails: after the first failure its descriptor leads to /dev/null."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._silence()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._silence()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _silence(self) -> None:
        with suppress(OSError, ValueError):  # a stream without a descriptor has nothing to redirect
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


@contextmanager
def outlive_terminal() -> Iterator[None]:
    """stdout and stderr never fail inside the context."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, LastingStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
