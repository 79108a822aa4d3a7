"""Writing past the page cache: the same bytes whatever is aligned, and nothing else breaks where it is refused."""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from pretrain.store import direct, open_store
from pretrain.store.direct import ALIGNMENT, FileWriter

MEGABYTE = 2**20


def pages(size: int, seed: int) -> memoryview:
    """Writable bytes that begin at a page."""
    whole = np.random.default_rng(seed).integers(0, 256, size + ALIGNMENT, dtype=np.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    return memoryview(whole[start : start + size])


@pytest.mark.parametrize("lengths", [[2 * MEGABYTE], [MEGABYTE, 3 * MEGABYTE, 777], [5, MEGABYTE], [MEGABYTE + 512, 9]])
def test_a_file_has_the_bytes_of_its_pieces(tmp_path: Path, lengths: list[int]) -> None:
    pieces = [pages(length, seed) for seed, length in enumerate(lengths)]
    store = open_store(tmp_path)
    assert store.put_stream("file", pieces) == sum(lengths)
    assert hashlib.sha256(store.get("file")).digest() == hashlib.sha256(b"".join(pieces)).digest()


def test_large_aligned_pieces_go_past_the_cache_and_others_through_it(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)

    def is_direct() -> bool:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)

    try:
        writer, modes = FileWriter(descriptor), []
        for length in (MEGABYTE, MEGABYTE, 100, MEGABYTE):  # the last one begins at an odd position
            writer.write(pages(length, length))
            modes.append(is_direct())
    finally:
        os.close(descriptor)
    assert modes[2:] == [False, False]
    if modes[0]:  # a tmpfs refuses
        assert modes[:2] == [True, True]
    assert (tmp_path / "file").stat().st_size == writer.written == 3 * MEGABYTE + 100


def test_a_file_system_that_refuses_gets_the_bytes_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "_DIRECT", 0o40000000)  # a bit that is no flag: F_SETFL ignores it or refuses
    piece = pages(MEGABYTE, 3)
    store = open_store(tmp_path)
    store.put_stream("file", [piece, piece])
    assert store.get("file") == bytes(piece) * 2
