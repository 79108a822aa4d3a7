"""Sources on real servers: what comes is what a local copy gives, whatever the server does; only time differs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pretrain.data.fetch as fetch_module
from pretrain.data.blocks import BlockReader, CorruptBlockError
from pretrain.data.cache import BlockCache
from pretrain.data.format import read_manifest
from pretrain.data.loader import open_loader
from pretrain.errors import DataError, StoreError
from pretrain.store import ListsSizes, open_store
from pretrain.topology import World
from tests.data_build.servers import HttpServer, files_over_http, s3_server
from tests.data_read.corpus import BYTE_LENGTHS, random_documents, run_config, write_tokenizer_file, write_tokens

STEPS = 14


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("remote")
    write_tokens(directory / "text", random_documents(150, 12), write_tokenizer_file(directory))
    return directory


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "_REMOTE_WAITS_S", (0.01,) * 4)


@pytest.fixture
def server(root: Path) -> Iterator[HttpServer]:
    with files_over_http(root) as state:
        yield state


def digests(root: Path, url: str | Path, cache: Path | None = None) -> list[int]:
    """Of every step of a run that reads the source at `url` for more than an epoch."""
    changes = {} if cache is None else {"data__cache": str(cache)}
    config = run_config(root / "tokenizer.json", {"text": str(url)}, **changes)
    with open_loader(config, BYTE_LENGTHS, World()) as loader:
        state, found = loader.initial_state(), []
        for step in range(STEPS):
            found.append(loader.read(step, state).digest)
            state = loader.next_state(state)
    return found


def data_reads(server: HttpServer) -> int:
    return sum(path.endswith(".tar") for path in server.requests)


def test_rows_over_http_are_the_local_ones_and_come_from_the_cache_the_next_time(
    root: Path, server: HttpServer, tmp_path: Path
) -> None:
    expected = digests(root, root / "text")
    assert digests(root, f"{server.url}/text", tmp_path / "cache") == expected
    blocks = read_manifest(open_store(root / "text")).blocks
    assert data_reads(server) == blocks == len(list((tmp_path / "cache").glob("*/*.block")))
    assert digests(root, f"{server.url}/text", tmp_path / "cache") == expected
    assert data_reads(server) == blocks
    cached = {"data__cache": str(tmp_path / "cache")}
    with open_loader(
        run_config(root / "tokenizer.json", {"text": f"{server.url}/text"}, **cached), BYTE_LENGTHS, World()
    ) as loader:
        loader.read(0, loader.initial_state())
        record = loader.fetch_record()
    assert record["data_cache_hits"] > 0
    assert (record["data_retries"], record["data_hedges"]) == (0, 0)


@pytest.mark.parametrize("kind", ["rclone", "moto"])
def test_rows_from_s3_are_the_local_ones(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with s3_server(kind, tmp_path / "s3", monkeypatch) as bucket:
        store = open_store(f"{bucket}/sources/text")
        for path in sorted((root / "text").iterdir()):
            store.put(path.name, path.read_bytes())
        assert digests(root, store.url) == digests(root, root / "text")
        for one in (store, open_store(root / "text")):
            assert isinstance(one, ListsSizes)
            assert one.sizes() == {path.name: path.stat().st_size for path in (root / "text").iterdir()}


@pytest.mark.parametrize("kind", ["error", "drop", "short", "flip once"])
def test_faults_of_the_server_delay_and_change_nothing(root: Path, server: HttpServer, kind: str) -> None:
    expected = digests(root, root / "text")
    met: list[str] = []

    def fault(number: int, path: str) -> str:
        if path.endswith(".tar") and number % 3 == 0:
            met.append(path)
            return kind
        return ""

    server.fault = fault
    assert digests(root, f"{server.url}/text") == expected
    assert len(met) >= 3


def test_failures_are_counted_and_at_last_an_error_that_is_no_corruption(root: Path, server: HttpServer) -> None:
    store = open_store(f"{server.url}/text")
    reader = BlockReader(store, read_manifest(store))
    server.requests.clear()
    server.fault = lambda number, path: "error" if number <= 2 else ""
    reader.read(0)
    assert (reader.counts.requests, reader.counts.retries, reader.counts.refetched) == (3, 2, 0)
    server.fault = lambda number, path: "error"
    with pytest.raises(StoreError, match=r"cannot read http://.*/text/00000\.tar: ClientResponseError: 500"):
        reader.read(1)
    assert reader.counts.retries == 2 + 4
    server.fault = lambda number, path: ""
    assert reader.read(1) is not None  # a failure is not settled as corruption is
    server.fault = lambda number, path: "flip"
    with pytest.raises(CorruptBlockError):
        reader.read(2)
    assert reader.counts.refetched == 1


def test_a_stalled_request_is_hedged_and_the_second_one_wins(
    root: Path, server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "_HEDGE_AFTER_S", 0.3)
    store = open_store(f"{server.url}/text")
    reader, local = (BlockReader(s, read_manifest(s)) for s in (store, open_store(root / "text")))
    reader.read(0)
    server.requests.clear()
    server.stall_s = 10.0
    server.fault = lambda number, path: "stall" if number == 1 else ""
    start = time.monotonic()
    block = reader.read(1)
    assert 0.3 <= time.monotonic() - start < 5
    assert all(np.array_equal(a, b) for a, b in zip(block, local.read(1), strict=True))
    assert (reader.counts.hedges, reader.counts.hedges_won, reader.counts.retries) == (1, 1, 0)
    assert reader.counts.wait_s >= 0.3


def test_a_server_that_falls_silent_is_an_error_that_names_the_object_in_time(
    root: Path, server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"{server.url}/text")
    reader = BlockReader(store, read_manifest(store))
    monkeypatch.setattr(reader._fetcher, "_deadline_s", 0.5)
    server.stall_s = 10.0
    server.fault = lambda number, path: "stall"
    start = time.monotonic()
    with pytest.raises(StoreError, match=r"text/00000\.tar \(bytes \d+ to \d+\) did not come within 0\.5 s"):
        reader.read(0)
    assert time.monotonic() - start < 5


def test_a_server_that_is_started_again_in_mid_run_is_waited_for(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "_REMOTE_WAITS_S", (0.1,) * 40)
    expected = digests(root, root / "text")
    changes = {"data__prefetch_steps": 1}
    with files_over_http(root) as first:
        config = run_config(root / "tokenizer.json", {"text": f"{first.url}/text"}, **changes)
        loader = open_loader(config, BYTE_LENGTHS, World())
        state, found = loader.initial_state(), []
        for step in range(3):
            found.append(loader.read(step, state).digest)
            state = loader.next_state(state)
    port = int(first.url.rpartition(":")[2])
    with loader, files_over_http(root, port=port, delay_s=0.5):
        for step in range(3, STEPS):
            found.append(loader.read(step, state).digest)
            state = loader.next_state(state)
    assert found == expected


def test_blocks_that_are_asked_for_ahead_come_side_by_side(root: Path, server: HttpServer) -> None:
    store = open_store(f"{server.url}/text")
    reader, local = (BlockReader(s, read_manifest(s)) for s in (store, open_store(root / "text")))
    server.stall_s = 0.4
    server.fault = lambda number, path: "stall"
    start = time.monotonic()
    reader.request(range(6))
    blocks = [reader.read(number) for number in range(6)]
    assert time.monotonic() - start < 6 * 0.4 * 0.8
    for number, block in enumerate(blocks):
        assert all(np.array_equal(a, b) for a, b in zip(block, local.read(number), strict=True))
    assert reader.counts.requests == 6
    reader.request([7, 8])
    reader.request([8, 9])  # 7 is given up
    assert reader.read(8) is not None
    assert sorted(reader._ahead) == [9]


def test_a_server_without_ranges_and_a_source_that_is_not_there_are_named(root: Path, server: HttpServer) -> None:
    store = open_store(f"{server.url}/text")
    reader = BlockReader(store, read_manifest(store))
    server.fault = lambda number, path: "whole"
    with pytest.raises(StoreError, match=r"gave \d+ bytes for a range of \d+\. The server ignores ranges"):
        reader.read(0)
    with pytest.raises(DataError, match=r"/nothing holds no manifest\.json"):
        digests(root, f"{server.url}/nothing")


def test_a_missing_shard_on_a_server_is_named_at_open(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "text", tmp_path / "text")
    (tmp_path / "text" / "00001.tar").unlink()
    with files_over_http(tmp_path) as server, pytest.raises(DataError, match=r"not whole: 00001\.tar is missing"):
        digests(root, f"{server.url}/text")


def test_what_a_killed_process_left_half_written_in_the_cache_goes(tmp_path: Path) -> None:
    import os

    (tmp_path / "ab").mkdir()
    old, young = tmp_path / "ab" / "abc.block.1-x", tmp_path / "ab" / "abd.block.2-y"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 3600,) * 2)
    BlockCache(tmp_path, 10**6).put("abe", b"whole")
    assert not old.exists()
    assert young.exists()
