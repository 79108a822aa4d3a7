"""Which checkpoints go. The newest good ones stay, whatever else is there; each rule only adds to what stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pretrain.checkpoint.holds import delete_unless_held
from pretrain.checkpoint.listing import CheckpointInfo, list_checkpoints
from pretrain.errors import UserError
from pretrain.store import Store


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the checkpoints with the smallest validation metric.

    Attributes:
        source: validation source.
        metric: "loss" or "bits_per_byte"; smaller is better.
        count: how many.
    """

    source: str
    metric: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Retention:
    """What is kept beside pinned checkpoints and those being read.

    Attributes:
        keep_last: newest good ones.
        keep_every_steps: those whose step is a multiple of it; None: no such rule.
        best: by validation metric; None: no such rule.
    """

    keep_last: int = 2
    keep_every_steps: int | None = None
    best: Best | None = None


def prune(
    store: Store, retention: Retention, guard: Callable[[], None], progress: Callable[[], None] = lambda: None
) -> list[str]:
    """Deletes what no rule keeps, and unfinished ones that nobody can finish.

    On one rank, after a checkpoint was published. Damaged ones stay as evidence until `keep_last` good
    ones are newer. The manifest goes first, so that a crash in between leaves an unfinished folder.

    Args:
        guard: called right before each deletion; raises when this attempt lost the run.
        progress: called for each file that was looked at or deleted.

    Returns:
        names of the deleted ones.

    Raises:
        UserError: `keep_last` is below 1.
        StoreError: a deletion failed.
    """
    if retention.keep_last < 1:
        raise UserError(
            f"keep_last={retention.keep_last} would delete the last good checkpoint. At least 1 stays. Set 1 or more."
        )
    deleted = []
    for info in disposable(list_checkpoints(store, progress), retention):
        guard()
        if delete_unless_held(store, info.name, progress):
            deleted.append(info.name)
    return deleted


def discard_after(
    store: Store, step: int, guard: Callable[[], None], progress: Callable[[], None] = lambda: None
) -> list[str]:
    """Deletes the checkpoints of later steps, those being read excepted: the run takes another way from `step` on.

    Args:
        guard, progress: as those of `prune`.

    Raises:
        StoreError: a deletion failed.
    """
    deleted = []
    for info in list_checkpoints(store, progress):
        if info.step > step:
            guard()
            if delete_unless_held(store, info.name, progress):
                deleted.append(info.name)
    return deleted


def disposable(newest_first: Sequence[CheckpointInfo], retention: Retention) -> list[CheckpointInfo]:
    """Those that may go. PURE.

    An unfinished folder may be a save under way only if it is newer than every good one: saves of an
    attempt follow each other, and an attempt ends before the next begins.
    """
    best = {info.name for info in best_of(newest_first, retention.best)}
    every = retention.keep_every_steps
    result, good = [], 0
    for info in newest_first:
        if info.problem is None:
            good += 1
            kept = info.pinned or info.name in best or (every is not None and info.step % every == 0)
            if good > retention.keep_last and not kept:
                result.append(info)
        elif not info.pinned and (good >= retention.keep_last or (good and info.problem == CheckpointInfo.UNFINISHED)):
            result.append(info)
    return result


def best_of(infos: Sequence[CheckpointInfo], best: Best | None) -> list[CheckpointInfo]:
    """The whole-looking ones with the smallest metric, best first; of equal ones the newer. PURE."""
    if best is None:
        return []
    measured = [(info.metric(best.source, best.metric), info) for info in infos if info.problem is None]
    ranked = sorted((pair for pair in measured if pair[0] is not None), key=lambda pair: pair[0] or 0.0)
    return [info for _, info in ranked[: best.count]]
