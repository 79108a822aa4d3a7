"""Which checkpoints go. The newest good ones stay, whatever else is there."""

from __future__ import annotations

from collections.abc import Callable

from pretrain.checkpoint.format import MANIFEST
from pretrain.checkpoint.listing import CheckpointInfo, list_checkpoints
from pretrain.errors import UserError
from pretrain.store import Store


def prune(store: Store, keep_last: int, guard: Callable[[], None]) -> list[str]:
    """Deletes all but the `keep_last` newest good checkpoints, and unfinished ones that nobody can finish.

    On one rank, after a checkpoint was published. Damaged ones stay as evidence until `keep_last` good
    ones are newer. The manifest goes first, so that a crash in between leaves an unfinished folder.

    Args:
        guard: called right before each deletion; raises when this attempt lost the run.

    Returns:
        names of the deleted ones.

    Raises:
        UserError: `keep_last` is below 1.
        StoreError: a deletion failed.
    """
    if keep_last < 1:
        raise UserError(
            f"keep_last={keep_last} would delete the last good checkpoint. At least 1 stays. Set 1 or more."
        )
    deleted = [info.name for info in disposable(list_checkpoints(store), keep_last)]
    for name in deleted:
        guard()
        store.delete(f"{name}/{MANIFEST}")
        store.delete_tree(name)
    return deleted


def disposable(newest_first: list[CheckpointInfo], keep_last: int) -> list[CheckpointInfo]:
    """Those that may go. PURE.

    An unfinished folder may be a save under way only if it is newer than every good one: saves of an
    attempt follow each other, and an attempt ends before the next begins.
    """
    result, good = [], 0
    for info in newest_first:
        if info.problem is None:
            good += 1
            if good > keep_last:
                result.append(info)
        elif good >= keep_last or (good and info.problem == CheckpointInfo.UNFINISHED):
            result.append(info)
    return result
