"""Runs the tasks of a build on this machine: in worker processes, or in the builder's own process.

Takes tasks -> gives their results as they are done. Pipes, not multiprocessing: a worker
ends when its stdin does, so none outlives a builder that was killed, and no `__main__` is imported again.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import pretrain
from pretrain.data.tasks import Task, as_error, as_json, run_task
from pretrain.data.tick import Tick
from pretrain.errors import PretrainError


@runtime_checkable
class TaskPool(Protocol):
    """Whatever runs tasks."""

    def run(self, tasks: Sequence[Task], tick: Tick) -> Iterator[tuple[int, dict[str, Any]]]:
        """(number, result) of every task, in any order. Raises PretrainError if one fails."""


class OwnProcess:
    """Runs tasks one after the other, here."""

    def run(self, tasks: Sequence[Task], tick: Tick) -> Iterator[tuple[int, dict[str, Any]]]:
        for task in tasks:
            yield task.number, run_task(task, tick)


class WorkerProcesses:
    """Starts its workers at once, so that their imports overlap with listing. A context manager: leaving ends them."""

    def __init__(self, num_workers: int, lock: int | None) -> None:
        """
        Args:
            lock: descriptor of the output's lock, which every worker holds too.
        """
        self._workers = [_Worker(lock) for _ in range(num_workers)]

    def run(self, tasks: Sequence[Task], tick: Tick) -> Iterator[tuple[int, dict[str, Any]]]:
        """
        Raises:
            PretrainError: a task failed or a worker died.
        """
        waiting = list(reversed(tasks))
        answers: SimpleQueue[tuple[int | None, Any]] = SimpleQueue()

        def serve(worker: _Worker) -> None:
            while waiting:
                try:
                    task = waiting.pop()
                except IndexError:
                    return
                try:
                    answers.put((task.number, worker.run(task, lambda *done: answers.put((None, done)))))
                except PretrainError as error:
                    answers.put((task.number, error))
                    return

        threads = [Thread(target=serve, args=(worker,), daemon=True) for worker in self._workers[: len(tasks)]]
        for thread in threads:
            thread.start()
        left = len(tasks)
        while left:
            number, answer = answers.get()
            if number is None:
                tick(*answer)
                continue
            if isinstance(answer, PretrainError):
                waiting.clear()
                self.kill()  # or the threads would wait for tasks that nobody wants any more
                for thread in threads:
                    thread.join()
                raise answer
            left -= 1
            yield number, answer
        for thread in threads:
            thread.join()

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for worker in self._workers:
            worker.close()

    def kill(self) -> None:
        for worker in self._workers:
            worker.kill()


class _Worker:
    """One `python -m pretrain.data.tasks`."""

    def __init__(self, lock: int | None) -> None:
        root = str(Path(pretrain.__file__).parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pretrain.data.tasks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[] if lock is None else [lock],  # locked until the last worker of a killed builder is gone
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path},
        )

    def run(self, task: Task, tick: Tick) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # readline tells why it ended
            self._process.stdin.write(as_json(task) + "\n")
            self._process.stdin.flush()
        while line := self._process.stdout.readline():
            answer = json.loads(line)
            if "error" in answer:
                raise as_error(answer)
            if "result" in answer:
                return dict(answer["result"])
            tick(*answer["tick"])
        code = self._process.wait()
        raise PretrainError(
            f"a build worker ended with code {code} in {task.stage} {task.number}. -9 usually means that memory ran "
            "out: use fewer --workers or a smaller --memory. What is done is kept: the same command goes on."
        )

    def kill(self) -> None:
        """Stops it now; what it was writing was not published."""
        self._process.kill()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.wait()
        self._process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
