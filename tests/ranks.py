"""Runs a module-level function in N rank processes and collects what each returned.

takes -> `run_ranks(function, ranks=2, arguments={...})`; gives -> one `RankResult` per rank.
The function is called as `function(world, **arguments)`; arguments and result are JSON. With
`process_group=True` a gloo group is up during the call. Every rank has one OMP thread and its own
process group; rank 0 inherits the listening rendezvous socket, so no port can be lost to a race.
Ranks are forked from a process that has imported what they need (tests/ranks_pool.py), unless they get an
`environment`, which imports may read: then each is a process of its own.
Nothing outlives the call: on a timeout, or some seconds after a rank failed, the rest is killed by pid.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ranks_pool import shared_pool

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class RankResult:
    """How one rank ended: its exit code (negative = signal), the function's value, its output."""

    rank: int
    returncode: int
    value: Any
    output: str


def run_ranks(
    function: Callable[..., Any] | str,
    *,
    ranks: int,
    arguments: Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
    process_group: bool = True,
    check: bool = True,
    environment: Mapping[str, str] | None = None,
    grace_s: float = 8.0,
) -> list[RankResult]:
    """Runs `function` (or "module:name") in `ranks` processes.

    Raises:
        AssertionError: `check` is set and a rank failed or the timeout passed; holds the ranks' output.
    """
    target = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        words = [target, json.dumps(dict(arguments or {})), folder, "group" if process_group else "alone"]
        run = _run_forked if environment is None else functools.partial(_run_started, environment)
        codes, timed_out = run(words, ranks, timeout_s, grace_s)
        results = [_collect(rank, code, Path(folder)) for rank, code in enumerate(codes)]
    if check and (timed_out or any(result.returncode for result in results)):
        report = "\n".join(f"--- rank {r.rank} ended with {r.returncode}\n{r.output[-6000:]}" for r in results)
        raise AssertionError(f"{target} failed{' (timeout)' if timed_out else ''}\n{report}")
    return results


def _run_forked(words: list[str], ranks: int, timeout_s: float, grace_s: float) -> tuple[list[int], bool]:
    logs = [Path(words[2]) / f"{rank}.log" for rank in range(ranks)]
    group = shared_pool().start(words, ranks=ranks, environment=_THREADS, logs=logs, main="tests.ranks:main",
                                rendezvous=True)  # fmt: skip
    try:
        timed_out = not _wait(lambda: [group.codes.get(rank) for rank in range(ranks)], timeout_s, grace_s)
    finally:
        group.kill()
    return [group.codes[rank] for rank in range(ranks)], timed_out


def _run_started(
    environment: Mapping[str, str], words: list[str], ranks: int, timeout_s: float, grace_s: float
) -> tuple[list[int], bool]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        processes = [_spawn(rank, ranks, words, listener, environment) for rank in range(ranks)]
        try:
            timed_out = not _wait(lambda: [process.poll() for process in processes], timeout_s, grace_s)
        finally:
            _kill(processes)
    return [process.returncode for process in processes], timed_out


_THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1"}


def _spawn(
    rank: int, ranks: int, words: list[str], listener: socket.socket, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    env = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        **_THREADS,
        **environment,
    }
    inherited: tuple[int, ...] = ()
    if rank == 0:
        inherited = (listener.fileno(),)
        env["PRETRAIN_MASTER_FD"] = str(listener.fileno())
    with open(Path(words[2]) / f"{rank}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.ranks", *words],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=inherited,
            start_new_session=True,
        )


def _wait(codes: Callable[[], list[int | None]], timeout_s: float, grace_s: float) -> bool:
    """True when all ended by themselves; gives up early when a rank failed and the others hang."""
    deadline = time.monotonic() + timeout_s
    failed = False
    while None in (seen := codes()):
        if not failed and any(seen):
            failed = True
            deadline = min(deadline, time.monotonic() + grace_s)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _collect(rank: int, code: int, folder: Path) -> RankResult:
    answer = folder / f"{rank}.json"
    value = json.loads(answer.read_text()) if answer.exists() else None
    output = (folder / f"{rank}.log").read_text(errors="replace")
    return RankResult(rank, code, value, output)


def main(words: list[str]) -> int:
    """A rank: calls the target and leaves its value in the folder."""
    import torch

    from pretrain.topology import World

    target, arguments, folder, mode = words
    torch.set_num_threads(1)
    world = World.from_environment()
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    if mode == "group":
        from pretrain.engine.distributed import start_process_group, stop_process_group

        start_process_group(world, torch.device("cpu"), timeout_s=60.0)
        value = function(world, **json.loads(arguments))
        stop_process_group()
    else:
        value = function(world, **json.loads(arguments))
    answer = Path(folder) / f"{world.rank}.json"
    temporary = answer.with_suffix(".partial")
    temporary.write_text(json.dumps(value))
    temporary.rename(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
