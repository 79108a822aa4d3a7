"""Checksums of a file, piece by piece, so that several threads share the work and a reader checks what it needs.

takes -> bytes; gives -> the sha256 of every piece of CHUNK_BYTES. A manifest holds them all and is itself
checksummed. One sequential sha256 of a whole file would bind a save and every restore to one core
(1 GB/s with SHA instructions, 0.4 GB/s without), and a range could not be trusted before all of it was read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

CHUNK_BYTES = 8 * 2**20
_HEX = 64
_MOST_THREADS = 4


def num_threads(ranks_here: int = 1) -> int:
    """Threads of one rank for hashing or reading, of those that its node's cores give to each rank."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST_THREADS, cores // ranks_here))


def digest(chunk: bytes | bytearray | memoryview) -> str:
    return hashlib.sha256(chunk).hexdigest()


def chunk_bounds(size: int, chunk_bytes: int = CHUNK_BYTES) -> list[tuple[int, int]]:
    """[start, stop) of every piece of a file."""
    return [(start, min(start + chunk_bytes, size)) for start in range(0, size, chunk_bytes)]


class Hashing:
    """Hashes pieces in threads of its own, while their owner writes them; a context manager."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="sha256")
        self._futures: list[Future[str]] = []

    def __enter__(self) -> Hashing:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def begin(self, chunks: Iterable[memoryview]) -> None:
        self._futures += [self._pool.submit(digest, chunk) for chunk in chunks]

    def results(self) -> tuple[str, ...]:
        """The digests, in the order of the pieces; waits for them."""
        return tuple(future.result() for future in self._futures)


def pack(digests: Iterable[str]) -> str:
    return "".join(digests)


def unpack(text: str) -> tuple[str, ...]:
    return tuple(text[start : start + _HEX] for start in range(0, len(text), _HEX))
