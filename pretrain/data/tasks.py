"""Tasks of a build: what can run in any process on any machine that sees the work store.

Takes a task (stage, number, item) -> runs the stage's pure function, leaves its files in the work store and gives
the result, which is also published as `FOLDER/done/NUMBER.json`: a task whose result is there is never run again.
As a process (`python -m pretrain.data.tasks`): a JSON line per task on stdin, JSON lines on stdout (progress,
then the result or an error); the end of stdin ends it at once.
Invariants: a task may run twice, at the same time too, and writes the same bytes.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from pretrain.data.stage_encode import encode_range
from pretrain.data.stage_pack import pack_documents
from pretrain.data.stage_read import read_piece
from pretrain.data.stage_write import write_shard
from pretrain.data.tick import Tick
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import DataError, PretrainError, StoreError, UserError
from pretrain.store import Store, open_store

COMMON, TOKENIZER = "common.json", "tokenizer.json"
_TELL_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work.

    Attributes:
        stage: read, encode, pack, write or unpack.
        number: of the task within its stage.
        work, out: stores of private files and of the finished sources.
        folder: of the stage in the work store.
        item: what is the task's own; what all tasks of the stage share is FOLDER/common.json.
    """

    stage: str
    number: int
    work: str
    out: str
    folder: str
    item: dict[str, Any]


def done_key(folder: str, number: int) -> str:
    """Where the result of a task is published."""
    return f"{folder}/done/{number:06d}.json"


def run_task(task: Task, tick: Tick) -> dict[str, Any]:
    """Runs one task and publishes its result.

    Raises:
        PretrainError: as the stage's function.
    """
    work, common = _store(task.work), _common(task.work, task.folder)
    result = _STAGES[task.stage](work, task, common, tick)
    work.put(done_key(task.folder, task.number), json.dumps(result).encode())
    return result


def _encode(work: Store, task: Task, common: dict[str, Any], tick: Tick) -> dict[str, Any]:
    tokenizer = _tokenizer(task.work, task.folder)
    return encode_range(work, task.folder, task.number, common, task.item, tick, tokenizer)


def _write(work: Store, task: Task, common: dict[str, Any], tick: Tick) -> dict[str, Any]:
    return write_shard(work, _store(task.out), common, task.item, tick)


def _unpack(work: Store, task: Task, common: dict[str, Any], tick: Tick) -> dict[str, Any]:
    from pretrain.data.stage_unpack import unpack_source  # torch comes with it: seconds that no other stage needs

    return unpack_source(work, task.folder, task.item, tick)


_STAGES: dict[str, Callable[[Store, Task, dict[str, Any], Tick], dict[str, Any]]] = {
    "read": lambda work, task, common, tick: read_piece(work, task.folder, task.number, common, task.item, tick),
    "encode": _encode,
    "pack": lambda work, task, common, tick: pack_documents(work, task.folder, task.number, common, task.item, tick),
    "write": _write,
    "unpack": _unpack,
}


@lru_cache(maxsize=8)
def _store(url: str) -> Store:
    return open_store(url)


@lru_cache(maxsize=4)
def _common(work: str, folder: str) -> dict[str, Any]:
    return dict(json.loads(_store(work).get(f"{folder}/{COMMON}")))


@lru_cache(maxsize=2)
def _tokenizer(work: str, folder: str) -> Tokenizer:
    return Tokenizer(_store(work).get(f"{folder}/{TOKENIZER}"), "the build's tokenizer")


def as_answer(error: Exception) -> dict[str, str]:
    """What a worker tells its builder of an error: its class, if it is one of ours, and its text."""
    if isinstance(error, PretrainError):
        return {"error": str(error), "kind": type(error).__name__}
    if isinstance(error, OSError):
        text = f"cannot write {error.filename}: {error.strerror}. Free space or choose another --out."
        return {"error": text, "kind": "StoreError"}
    # Libraries raise bare Exception; the builder names the worker's cause.
    return {"error": f"{type(error).__name__}: {error}", "kind": "PretrainError"}


def as_error(answer: dict[str, str]) -> PretrainError:
    """The error of `as_answer`, to be raised by the builder."""
    kind = {"DataError": DataError, "StoreError": StoreError, "UserError": UserError}.get(answer["kind"], PretrainError)
    return kind(answer["error"])


def _serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the builder, which closes our stdin
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(1)  # the builder is gone: nobody wants what is under way

    threading.Thread(target=listen, daemon=True).start()
    told, waiting = time.monotonic(), [0, 0]

    def tick(num_bytes: int, num_tokens: int) -> None:
        nonlocal told
        waiting[0] += num_bytes
        waiting[1] += num_tokens
        if time.monotonic() - told > _TELL_EVERY_S:
            print(json.dumps({"tick": waiting}), flush=True)
            told, waiting[:] = time.monotonic(), [0, 0]

    while True:
        task = Task(**json.loads(lines.get()))
        answer: dict[str, Any]
        try:
            answer = {"result": run_task(task, tick)}
        except Exception as error:
            answer = as_answer(error)
        print(json.dumps({"tick": waiting}), flush=True)
        waiting[:] = [0, 0]
        print(json.dumps(answer), flush=True)


def as_json(task: Task) -> str:
    return json.dumps(asdict(task))


if __name__ == "__main__":
    try:
        _serve()
    except BrokenPipeError:  # the builder was killed
        os._exit(1)
