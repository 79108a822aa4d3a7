"""A save under way, as its caller sees it: a thread with progress, an error that surfaces, a wish to give up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pretrain.errors import PretrainError, StoreError

_POLL_S = 0.01  # between two looks at the progress


@dataclass
class SaveProgress:
    """What the thread and the handle share.

    Attributes:
        count: chunks written and looks for other ranks so far.
        cancelled: a wish to give up.
        warning: what went wrong without harm to the save.
        bytes: of the whole checkpoint, on the rank that published it.
    """

    count: int = 0
    warning: str = ""
    bytes: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)

    def step(self) -> None:
        """One bit more is done."""
        self.count += 1


class SaveHandle:
    """A save under way.

    Attributes:
        name: of the checkpoint.
        stall_s: seconds that the caller stood still.
        write_s: seconds in the background until it was durable; 0 before.
    """

    def __init__(self, name: str, stall_s: float, work: Callable[[SaveProgress], None]) -> None:
        self.name, self.stall_s, self.write_s = name, stall_s, 0.0
        self._work = work
        self._error: PretrainError | None = None
        self._progress = SaveProgress()
        self._thread = threading.Thread(target=self._run, name=f"save {name}", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when this rank's part is durable; on rank 0: when the checkpoint is published. No collective.

        Raises:
            StoreError: it could not be written; nothing of it counts.
            FencedError: a newer attempt has the run.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def watch(self, beat: Callable[[], None]) -> None:
        """Waits as `wait` does, without its errors, and calls `beat` at each bit of progress.

        A large save is slow, a stuck one is silent.
        """
        watch_progress(lambda: self.done, lambda: self.progress, beat)

    def cancel(self) -> None:
        """Stops waiting for other ranks; `wait` then raises unless it was published already."""
        self._progress.cancelled.set()

    @property
    def warning(self) -> str:
        """What went wrong without harm to the save; to be read when it is done."""
        return self._progress.warning

    @property
    def bytes(self) -> int:
        """Size of the whole checkpoint, on rank 0 when it is done."""
        return self._progress.bytes

    @property
    def progress(self) -> int:
        """Grows as long as the save goes on; a save whose progress stands still is stuck in its storage."""
        return self._progress.count

    def _run(self) -> None:
        started = time.monotonic()
        try:
            self._work(self._progress)
            self.write_s = time.monotonic() - started
        except PretrainError as error:
            self._error = error
        except Exception as error:  # a thread's traceback would be lost
            self._error = StoreError(f"saving {self.name} failed: {error!r}. This is not foreseen; please report it.")


def watch_progress(is_done: Callable[[], bool], progress: Callable[[], int], beat: Callable[[], None]) -> None:
    """Waits until a thread's work is done, and calls `beat` whenever its progress has changed."""
    seen = progress()
    while not is_done():
        time.sleep(_POLL_S)
        if progress() != seen:
            seen = progress()
            beat()
