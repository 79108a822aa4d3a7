"""Runs a function of a benchmark in several rank processes, for what one process cannot show.

takes -> "module:function", ranks; gives -> what rank 0 returned (JSON). The function is called as
`function(world, **arguments)` with a gloo group up. Ranks that do not end are killed.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pretrain.processor import use_large_pages


def run_in_ranks(target: str, ranks: int, arguments: dict[str, Any], *, timeout_s: float) -> Any:
    """
    Raises:
        RuntimeError: a rank failed or did not end in time; holds the end of its output.
    """
    use_large_pages()  # as every rank of a run does
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "benchmarks.ranks", target, json.dumps(arguments), str(answer)]
        processes, logs = [], [Path(folder) / f"{rank}.log" for rank in range(ranks)]
        try:
            for rank in range(ranks):
                environment = {
                    **os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
                    "MASTER_PORT": str(listener.getsockname()[1]), "DS_ACCELERATOR": "cpu",
                    **({} if rank else {"PRETRAIN_MASTER_FD": str(listener.fileno())}),
                }  # fmt: skip
                with logs[rank].open("wb") as log:
                    processes.append(
                        subprocess.Popen(
                            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                            pass_fds=() if rank else (listener.fileno(),), start_new_session=True,
                        )
                    )  # fmt: skip
            deadline = time.monotonic() + timeout_s
            while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
                if any(process.poll() for process in processes):
                    break
                time.sleep(0.05)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if any(process.returncode for process in processes):
            raise RuntimeError("\n".join(log.read_text(errors="replace")[-3000:] for log in logs))
        return json.loads(answer.read_text())


def _main(target: str, arguments: str, answer: str) -> None:
    import torch

    from pretrain.engine.distributed import start_process_group, stop_process_group
    from pretrain.topology import World
    from pretrain.train.watch import die_with_parent

    die_with_parent()
    torch.set_num_threads(1)
    world = World.from_environment()
    start_process_group(world, torch.device("cpu"), 120.0)
    module, _, name = target.partition(":")
    value = getattr(importlib.import_module(module), name)(world, **json.loads(arguments))
    if world.is_main:
        Path(answer).write_text(json.dumps(value))
    stop_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
