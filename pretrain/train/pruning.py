"""Old checkpoints are deleted beside the loop: a store may take seconds for it, and a step has none to spare.

takes → the checkpoints' store, what is kept, the guard; gives → a thread that deletes, one prune at a time. What
cannot be deleted stays and costs a warning; a fenced attempt deletes nothing more and learns of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from pretrain.checkpoint import Retention, prune
from pretrain.checkpoint.handle import watch_progress
from pretrain.errors import FencedError, PretrainError
from pretrain.log import Log
from pretrain.store import Store


class Pruner:
    """Deletes what the rules of retention do not keep, on one rank."""

    def __init__(self, store: Store, retention: Retention, guard: Callable[[], None], log: Log) -> None:
        """
        Args:
            guard: called right before each deletion; raises FencedError when this attempt may not delete any more.
        """
        self._store, self._retention, self._guard, self._log = store, retention, guard, log
        self._thread: threading.Thread | None = None
        self._looks = 0  # files that were looked at or deleted
        self._fenced: FencedError | None = None

    def begin(self) -> None:
        """Deletes in the background; waits for what was begun before."""
        self.finish()
        self._thread = threading.Thread(target=self._prune, name="prune", daemon=True)
        self._thread.start()

    def finish(self, beat: Callable[[], None] = lambda: None) -> None:
        """Waits until what was begun is done.

        Args:
            beat: called as files are looked at and deleted; a store that hangs is silent.

        Raises:
            FencedError: a newer attempt has the run.
        """
        if self._thread is not None:
            thread, self._thread = self._thread, None
            watch_progress(lambda: not thread.is_alive(), lambda: self._looks, beat)
        if self._fenced is not None:
            raise self._fenced

    def _prune(self) -> None:
        try:
            for name in prune(self._store, self._retention, self._guard, self._look):
                self._log.info("pruned", checkpoint=name)
        except FencedError as error:
            self._fenced = error
        except PretrainError as error:  # what should have gone stays: nothing is lost but space
            self._log.warning("old checkpoints could not be pruned", why=error)

    def _look(self) -> None:
        self._looks += 1
