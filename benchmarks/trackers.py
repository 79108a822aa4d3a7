"""What a tracker in trouble costs a run: steps of a real run beside wandb servers that are dead or never answer.

`python -m pretrain` with the smallest model, in turn without a tracker, with wandb offline, with a server that nobody
listens at, with one that takes connections and says nothing, and with Prometheus clients that never end their request.
Steps after the 50th of 200; every record must be on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.result import Result, interleave, median
from benchmarks.tiny_run import ROOT, prepare

STEPS, SETTLED = 200, 50
_ONLINE, _OFFLINE = "metrics.wandb.mode=online", "metrics.wandb.mode=offline"


def _step_s(folder: Path, *overrides: str, server: str = "", clients: int = 0) -> float:
    """Median seconds of a step."""
    name = f"run-{time.time_ns()}"
    words = [str(ROOT / "configs/tests/tiny-decoder.yaml"), f"name={name}", f"schedule.total_steps={STEPS}", *overrides]
    words += ["cluster.num_ranks=1", f"checkpoint.every_steps={STEPS}", "tokenizer=tokenizer.json"]
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "PRETRAIN_HOME": str(folder), "OMP_NUM_THREADS": "1",
        "WANDB_BASE_URL": server or "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40, "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    log = folder / f"{name}.log"
    with log.open("wb") as output, contextlib.ExitStack() as stack:
        run = [sys.executable, "-m", "pretrain", *words, "data.sources.text.path=text"]
        process = subprocess.Popen(run, cwd=folder, env=environment, stdout=output, stderr=output)
        if clients:
            stack.enter_context(_asking(log, clients))
        if process.wait(300):
            raise RuntimeError(log.read_text()[-2000:])
    lines = (folder / name / "metrics" / "attempt-001.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "loss" in record]
    if [record["step"] for record in records] != list(range(1, STEPS + 1)):
        raise RuntimeError(f"{len(records)} of {STEPS} records are on disk")
    return median([record["step_s"] for record in records[SETTLED:]])


@contextlib.contextmanager
def _silent() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        taken: list[socket.socket] = []

        def take() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(server.accept()[0])

        threading.Thread(target=take, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    for connection in taken:
        connection.close()


@contextlib.contextmanager
def _asking(log: Path, clients: int) -> Iterator[None]:
    """So many clients of rank 0's exporter that begin a request and do not go on; shut out, they come again."""
    ended = threading.Event()

    def ask() -> None:
        while not ended.wait(0.1):
            if found := re.search(r"http://127\.0\.0\.1:(\d+)/metrics", log.read_text()):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(found[1]))) as client:
                    client.sendall(b"GET /metrics HTTP/1.1\r\nHost")
                    client.settimeout(1.0)
                    client.recv(1)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    yield
    ended.set()
    for thread in threads:
        thread.join(5)


def measure(*, quick: bool, command: str) -> list[Result]:
    """Step times beside those without a tracker."""
    repetitions = 1 if quick else 3
    with tempfile.TemporaryDirectory() as name, _silent() as silent:
        folder = Path(name)
        prepare(folder)
        sides = {
            "none": lambda: _step_s(folder),
            "wandb_offline": lambda: _step_s(folder, _OFFLINE),
            "wandb_dead": lambda: _step_s(folder, _ONLINE),
            "wandb_silent": lambda: _step_s(folder, _ONLINE, server=silent),
            "prometheus_stuck": lambda: _step_s(folder, "metrics.prometheus.port=0", clients=20),
        }
        found = interleave(sides, repetitions)
    plain_s = median(found.pop("none"))
    return [
        Result(f"trackers.{side}", median(values) / plain_s, "ratio", "step without a tracker, s", plain_s, repetitions,
               command)
        for side, values in found.items()
    ]  # fmt: skip
