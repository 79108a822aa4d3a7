"""Runs a module-level function in N rank processes and collects what each returned.

takes -> `run_ranks(function, ranks=2, arguments={...})`; gives -> one `RankResult` per rank.
The function is called as `function(world, **arguments)`; arguments and result are JSON. With
`process_group=True` a gloo group is up during the call. Every rank has one OMP thread and its own
process group; rank 0 inherits the listening rendezvous socket, so no port can be lost to a race.
Nothing outlives the call: on a timeout, or some seconds after a rank failed, the rest is killed by pid.
"""

from __future__ import annotations

import contextlib
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
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        processes = [
            _spawn(rank, ranks, target, dict(arguments or {}), Path(folder), listener, process_group, environment)
            for rank in range(ranks)
        ]
        try:
            timed_out = not _wait(processes, timeout_s, grace_s)
        finally:
            _kill(processes)
        results = [_collect(rank, process, Path(folder)) for rank, process in enumerate(processes)]
    if check and (timed_out or any(result.returncode for result in results)):
        report = "\n".join(f"--- rank {r.rank} ended with {r.returncode}\n{r.output[-6000:]}" for r in results)
        raise AssertionError(f"{target} failed{' (timeout)' if timed_out else ''}\n{report}")
    return results


def _spawn(
    rank: int,
    ranks: int,
    target: str,
    arguments: dict[str, Any],
    folder: Path,
    listener: socket.socket,
    process_group: bool,
    environment: Mapping[str, str] | None,
) -> subprocess.Popen[bytes]:
    env = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONUNBUFFERED": "1",
        **(environment or {}),
    }
    inherited: tuple[int, ...] = ()
    if rank == 0:
        inherited = (listener.fileno(),)
        env["PRETRAIN_MASTER_FD"] = str(listener.fileno())
    command = [sys.executable, "-m", "tests.ranks", target, json.dumps(arguments), str(folder / f"{rank}.json")]
    with open(folder / f"{rank}.log", "wb") as log:
        return subprocess.Popen(
            [*command, "group" if process_group else "alone"],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=inherited,
            start_new_session=True,
        )


def _wait(processes: list[subprocess.Popen[bytes]], timeout_s: float, grace_s: float) -> bool:
    """True when all ended by themselves; gives up early when a rank failed and the others hang."""
    deadline = time.monotonic() + timeout_s
    failed = False
    while any(process.poll() is None for process in processes):
        if not failed and any(process.poll() for process in processes):
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


def _collect(rank: int, process: subprocess.Popen[bytes], folder: Path) -> RankResult:
    answer = folder / f"{rank}.json"
    value = json.loads(answer.read_text()) if answer.exists() else None
    output = (folder / f"{rank}.log").read_text(errors="replace")
    return RankResult(rank, process.returncode, value, output)


def _rank_main(target: str, arguments: str, answer: str, mode: str) -> None:
    import torch

    from pretrain.topology import World

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
    temporary = Path(answer + ".partial")
    temporary.write_text(json.dumps(value))
    temporary.rename(answer)


if __name__ == "__main__":
    _rank_main(*sys.argv[1:])
