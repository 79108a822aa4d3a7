"""Structured log of a process: one line per event, readable by people, `key=value` for machines."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stream(Protocol):
    """What a log needs of a text stream."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...


class Log:
    """Writes `HH:MM:SS r3 message key=value …` to a stream, flushed, so that a crash loses nothing.

    A stream that takes nothing (a full disk, a reader that is gone) never ends what the log tells about.
    """

    def __init__(self, rank: int | None = None, stream: Stream | None = None) -> None:
        self._prefix = "" if rank is None else f"r{rank} "
        self._stream = stream

    def info(self, message: str, **fields: Any) -> None:
        self._write(message, fields)

    def warning(self, message: str, **fields: Any) -> None:
        self._write(f"WARNING {message}", fields)

    def error(self, message: str, **fields: Any) -> None:
        self._write(f"ERROR {message}", fields)

    def _write(self, message: str, fields: dict[str, Any]) -> None:
        stream = self._stream or sys.stderr
        tail = "".join(f" {key}={_show(value)}" for key, value in fields.items())
        with contextlib.suppress(OSError):
            stream.write(f"{time.strftime('%H:%M:%S')} {self._prefix}{message}{tail}\n")
            stream.flush()


def _show(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return repr(text) if " " in text else text
