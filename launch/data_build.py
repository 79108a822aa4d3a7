"""The tasks of a build on a Ray cluster, as a Ray Data pipeline.

Takes tasks -> gives their results. The work store and OUT lie where every node sees them (a shared folder or an
object store); what tasks exchange goes through the store, so the loss of a node loses nothing that
is done: Ray runs its tasks again elsewhere, and they write the same bytes. Ray carries task lines and results only.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Any

from pretrain.data.build import BuildOptions, OpenPool
from pretrain.data.task_pool import TaskPool
from pretrain.data.tasks import Task, as_answer, as_error, run_task
from pretrain.data.tick import Tick
from pretrain.errors import UserError

_ANSWER_S = 10.0


def ray_pool(address: str | None) -> OpenPool:
    """What opens the pool: joins the cluster at `address` (or the one that Ray finds) for as long as a build lasts."""

    def open_pool(options: BuildOptions, expected_bytes: int, lock: int | None) -> AbstractContextManager[TaskPool]:
        return _joined(address, options.workers)

    return open_pool


@contextmanager
def _joined(address: str | None, most_at_once: int | None) -> Iterator[TaskPool]:
    """
    Raises:
        UserError: there is no cluster at the address.
    """
    import ray

    import launch
    import pretrain

    try:
        _check_that_somebody_listens(address)
        ray.init(
            address=address or "auto",
            log_to_driver=False,
            logging_level="ERROR",
            # The code of this process, whatever is installed there.
            runtime_env={"py_modules": [pretrain, launch], "env_vars": {"TOKENIZERS_PARALLELISM": "false"}},
        )
    except Exception as error:  # Ray raises many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"address={address or 'auto'}: no Ray cluster can be joined there ({reason}). A build with --ray runs on a "
            "cluster that is up. Start one with `ray start --head`, give its --address, or leave --ray out."
        ) from error
    try:
        _quiet()
        yield RayTasks(most_at_once)
    finally:
        ray.shutdown()


def _check_that_somebody_listens(address: str | None) -> None:
    """Ray asks a port that nobody answers for minutes. Raises OSError; names like `auto` and `ray://` are Ray's own."""
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()


class RayTasks:
    """Runs tasks as a Ray Data pipeline, one row each.

    Args:
        most_at_once: tasks that run side by side; None takes all CPUs of the cluster.
    """

    def __init__(self, most_at_once: int | None) -> None:
        self._most_at_once = most_at_once

    def run(self, tasks: Sequence[Task], tick: Tick) -> Iterator[tuple[int, dict[str, Any]]]:
        """
        Raises:
            PretrainError: a task failed.
        """
        if not tasks:
            return
        import ray

        rows = ray.data.from_items([json.dumps(asdict(task)) for task in tasks], override_num_blocks=len(tasks))
        # A node that dies takes its tasks with it: Ray Data runs them again, however often, somewhere else.
        at_once = ray.data.TaskPoolStrategy(size=self._most_at_once)
        answers = rows.map(_run_row, num_cpus=1, compute=at_once)
        for row in answers.iter_rows():
            answer = json.loads(row["answer"])
            if "error" in answer:
                raise as_error(answer)
            tick(*answer["done"])
            yield answer["number"], answer["result"]


def _run_row(row: dict[str, Any]) -> dict[str, str]:
    task = Task(**json.loads(row["item"]))
    done = [0, 0]

    def count(num_bytes: int, num_tokens: int) -> None:
        done[0] += num_bytes
        done[1] += num_tokens

    answer: dict[str, Any]
    try:
        answer = {"number": task.number, "result": run_task(task, count), "done": done}
    except Exception as error:
        answer = as_answer(error)
    return {"answer": json.dumps(answer)}


def _quiet() -> None:
    """Ray Data's own progress bars and logs stay off: ours says the same in a line."""
    import logging

    from ray.data import DataContext

    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    for name in ("ray.data", "ray"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
