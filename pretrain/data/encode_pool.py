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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

import pretrain
from pretrain.data.encode import EncodeCounts, EncodeJob, encode_bucket
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import PretrainError


class EncodePool:
    """Starts its workers at once, so that their imports overlap with reading. A context manager: leaving ends them."""

    def __init__(self, num_workers: int, lock: int) -> None:
        """
        Args:
            lock: descriptor of the output's lock, which every worker holds too.
        """
        self._workers = [_Worker(lock) for _ in range(num_workers)] if num_workers > 1 else []

    def encode(self, buckets: Sequence[Path], job: EncodeJob) -> Iterator[EncodeCounts]:
        """Encodes all buckets, once per pool; yields in their order while later ones are under way.

        Raises:
            PretrainError: a worker failed or died.
        """
        if not self._workers:
            tokenizer = Tokenizer.load(job.tokenizer)
            for bucket in buckets:
                yield encode_bucket(bucket, job, tokenizer)
            return
        idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            worker.send(asdict(job))
            idle.put(worker)

        def run(bucket: Path) -> EncodeCounts:
            worker = idle.get()
            try:
                return worker.encode(bucket)
            finally:
                idle.put(worker)

        executor = ThreadPoolExecutor(len(self._workers))
        try:
            for future in [executor.submit(run, bucket) for bucket in buckets]:
                yield future.result()
        finally:
            self._kill()  # or the threads would wait for buckets that nobody wants any more
            executor.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> EncodePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()
        for worker in self._workers:
            worker.close()

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()


class _Worker:
    """One `python -m pretrain.data.encode`."""

    def __init__(self, lock: int) -> None:
        root = str(Path(pretrain.__file__).parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pretrain.data.encode"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[lock],  # the output stays locked until the last worker of a killed builder is gone
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path},
        )

    def send(self, value: object) -> None:
        """One JSON line: the job first, then bucket paths."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # readline tells why it ended
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()

    def encode(self, bucket: Path) -> EncodeCounts:
        self.send(str(bucket))
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

    def kill(self) -> None:
        """Stops it now; what it was writing is thrown away with the build, or it is idle."""
        self._process.kill()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.wait()
        self._process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
