"""Worker processes that encode buckets, one thread of the tokenizer each.

Takes bucket paths -> gives `EncodeCounts` in the same order. Pipes, not multiprocessing: a worker
ends when its stdin does, so none outlives a builder that was killed, and no `__main__` is imported again.
With one worker the buckets are encoded in this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue

import pretrain
from pretrain.data.encode import EncodeCounts, EncodeJob, encode_bucket
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import PretrainError


def encode_all(buckets: Sequence[Path], job: EncodeJob, num_workers: int) -> Generator[EncodeCounts, None, None]:
    """Encodes all buckets; yields in their order while later ones are under way.

    Raises:
        PretrainError: a worker failed or died.
    """
    if num_workers == 1:
        tokenizer = Tokenizer.load(job.tokenizer)
        for bucket in buckets:
            yield encode_bucket(bucket, job, tokenizer)
        return
    workers: list[_Worker] = []
    idle: SimpleQueue[_Worker] = SimpleQueue()

    def run(bucket: Path) -> EncodeCounts:
        worker = idle.get()
        try:
            return worker.encode(bucket)
        finally:
            idle.put(worker)

    executor = ThreadPoolExecutor(num_workers)
    try:
        for _ in range(num_workers):
            workers.append(_Worker(job))
            idle.put(workers[-1])
        for future in [executor.submit(run, bucket) for bucket in buckets]:
            yield future.result()
    finally:
        for worker in workers:
            worker.end()
        executor.shutdown(wait=True, cancel_futures=True)
        for worker in workers:
            worker.close()


class _Worker:
    """One `python -m pretrain.data.encode`."""

    def __init__(self, job: EncodeJob) -> None:
        root = str(Path(pretrain.__file__).parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pretrain.data.encode"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path},
        )
        self._send(asdict(job))

    def encode(self, bucket: Path) -> EncodeCounts:
        self._send(str(bucket))
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise PretrainError(
                f"an encoding worker ended with code {code} on {bucket.name}. "
                "-9 usually means that memory ran out: use fewer --workers."
            )
        answer = json.loads(line)
        if "error" in answer:
            raise PretrainError(answer["error"])
        return EncodeCounts(**answer)

    def end(self) -> None:
        """Stops it now; what it was writing is thrown away with the build, or it is idle."""
        self._process.kill()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.wait()
        self._process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _send(self, value: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # readline tells why it ended
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()
