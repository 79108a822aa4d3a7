"""Runs the stages of a build one after the other, each only as far as it is not done yet.

Takes a stage's items -> gives the results of all its tasks, from the work store where they are there already.
    FOLDER/common.json, items.json    what the tasks are; written once, so that a restart has the same ones
    FOLDER/done/NUMBER.json           result of a task
    FOLDER/stage.json                 results of all tasks: the stage is done
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from pretrain.data.task_pool import TaskPool
from pretrain.data.tasks import COMMON, Task, done_key
from pretrain.data.tick import Tick
from pretrain.store import Store

_ITEMS, _STAGE = "items.json", "stage.json"


class StageRunner:
    """
    Attributes:
        tasks, reused: tasks of all stages so far, and how many of them an earlier build had done.
    """

    def __init__(self, work: Store, out: Store, pool: TaskPool) -> None:
        self._work, self._out, self._pool = work, out, pool
        self.tasks = self.reused = 0

    def is_done(self, folder: str) -> bool:
        return self._work.exists(f"{folder}/{_STAGE}")

    def run(
        self,
        stage: str,
        folder: str,
        common: Callable[[], dict[str, Any]],
        items: Callable[[], Sequence[dict[str, Any]]],
        tick: Tick,
        reuse: Callable[[dict[str, Any]], None],
    ) -> list[dict[str, Any]]:
        """Results of all tasks of a stage, by number.

        Args:
            common, items: make what the tasks share and what is each one's own, if nobody has yet.
            reuse: hears the results that were there.

        Raises:
            PretrainError: a task failed; what others did is kept.
        """
        done = self._results(folder, common, items)
        todo = [
            Task(stage, number, self._work.url, self._out.url, folder, item)
            for number, item in enumerate(self._items)
            if number not in done
        ]
        self.tasks += len(self._items)
        self.reused += len(done)
        for result in done.values():
            reuse(result)
        for number, result in self._pool.run(todo, tick):
            done[number] = result
        results = [done[number] for number in range(len(self._items))]
        if todo or not self.is_done(folder):
            self._work.put(f"{folder}/{_STAGE}", json.dumps(results).encode())
        return results

    def _results(
        self, folder: str, common: Callable[[], dict[str, Any]], items: Callable[[], Sequence[dict[str, Any]]]
    ) -> dict[int, dict[str, Any]]:
        work = self._work
        if self.is_done(folder):
            results = json.loads(work.get(f"{folder}/{_STAGE}"))
            self._items: Sequence[dict[str, Any]] = [{}] * len(results)
            return dict(enumerate(results))
        if not work.exists(f"{folder}/{_ITEMS}"):
            work.put(f"{folder}/{COMMON}", json.dumps(common()).encode())
            work.put(f"{folder}/{_ITEMS}", json.dumps(items()).encode())
        self._items = json.loads(work.get(f"{folder}/{_ITEMS}"))
        numbers = [int(name.partition(".")[0]) for name in work.names(f"{folder}/done")]
        return {number: json.loads(work.get(done_key(folder, number))) for number in numbers}


def drop_stage(work: Store, folder: str) -> None:
    """Removes a stage, first what says that it is done: a kill in between leaves nothing that is taken for whole."""
    work.delete(f"{folder}/{_STAGE}")
    work.delete_tree(f"{folder}/done")
    work.delete_tree(folder)
