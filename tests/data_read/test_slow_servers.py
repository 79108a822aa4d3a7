"""Servers that limit, die and come back while a run reads from them: rows come late, never other, fewer or twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import pretrain.data.fetch as fetch_module
from pretrain.config.schema import RunConfig
from pretrain.data.documents import SourceSpec
from pretrain.data.inputs import list_files
from pretrain.data.loader import Loader, open_loader
from pretrain.errors import StoreError
from pretrain.store import open_store
from pretrain.topology import World
from tests.data_build.servers import files_over_http, s3_process, slow_nginx
from tests.data_read.corpus import BYTE_LENGTHS, random_documents, run_config, write_tokenizer_file, write_tokens

STEPS = 30


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("slow")
    write_tokens(directory / "text", random_documents(500, 12), write_tokenizer_file(directory), shard_blocks=40)
    return directory


def config_of(root: Path, url: str) -> RunConfig:
    return run_config(root / "tokenizer.json", {"text": url}, data__prefetch_steps=1)


def steps_of(loader: Loader) -> Iterator[tuple[int, int]]:
    """(step, digest of its rows)."""
    state = loader.initial_state()
    for step in range(STEPS):
        yield step, loader.read(step, state).digest
        state = loader.next_state(state)


@pytest.fixture(scope="module")
def expected(root: Path) -> dict[int, int]:
    with open_loader(config_of(root, str(root / "text")), BYTE_LENGTHS, World()) as loader:
        found = dict(steps_of(loader))
    assert len(set(found.values())) == STEPS
    return found


def test_nginx_that_limits_bytes_and_requests_delays_and_changes_nothing(
    root: Path, tmp_path: Path, expected: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "_REMOTE_WAITS_S", (0.1,) * 20)
    with (
        slow_nginx(root, tmp_path, bytes_per_s=20_000, requests_per_s=20) as (url, log),
        open_loader(config_of(root, f"{url}/text"), BYTE_LENGTHS, World()) as loader,
    ):
        assert dict(steps_of(loader)) == expected
        record = loader.fetch_record()
    answers = [line.split()[0] for line in log.read_text().splitlines() if line.endswith(".tar")]
    assert "206" in answers
    assert "503" in answers, "the limit of requests was met"
    assert record["data_retries"] >= 1
    assert record["data_fetch_s"] > 0


def test_a_server_that_is_too_busy_to_say_whether_a_file_is_there_has_not_said_that_it_is_not(root: Path) -> None:
    with files_over_http(root) as server:
        store, url = open_store(f"{server.url}/text"), f"{server.url}/text/manifest.json"
        server.refuses_head = True
        server.fault = lambda number, path: "error"
        for ask in (store.size, store.exists):
            with pytest.raises(StoreError, match=r"manifest\.json: ClientResponseError: 500"):
                ask("manifest.json")
        server.fault = lambda number, path: "error" if number < 5 else ""  # two were asked for above
        assert [file.origin for file in list_files(SourceSpec((url,), format="text"))] == [url]
        assert not store.exists("nothing")


def test_each_block_is_fetched_once_though_many_steps_read_from_it(root: Path) -> None:
    with files_over_http(root) as server:
        with open_loader(config_of(root, f"{server.url}/text"), BYTE_LENGTHS, World()) as loader:
            state = loader.initial_state()
            for step in range(4):  # with all that is asked for ahead less than an epoch
                loader.read(step, state)
                state = loader.next_state(state)
        blocks = [path for path in server.requests if path.endswith(".tar")]
        assert len(blocks) == len({asked for asked in server.asked if asked[0].endswith(".tar")}) > 8


def test_from_s3_no_step_waits_once_the_first_is_there_and_the_steps_ahead_had_time_to_come(
    root: Path, tmp_path: Path, expected: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_process("rclone", tmp_path / "s3", monkeypatch):
        store = open_store("s3://bucket/text")
        for path in sorted((root / "text").iterdir()):
            store.put(path.name, path.read_bytes())
        with open_loader(config_of(root, store.url), BYTE_LENGTHS, World()) as loader:
            found = {}
            for step, digest in steps_of(loader):
                found[step] = digest
                deadline = time.monotonic() + 30
                while loader._prefetcher.num_ready < 2 and time.monotonic() < deadline:  # training, for as long
                    time.sleep(0.002)
            assert loader.fetch_record()["data_waits"] == 1
    assert found == expected


def test_an_s3_server_killed_and_started_again_in_mid_run_delays_and_changes_nothing(
    root: Path, tmp_path: Path, expected: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "_REMOTE_WAITS_S", (0.1,) * 100)
    with s3_process("rclone", tmp_path / "s3", monkeypatch) as server:
        store = open_store("s3://bucket/sources/text")
        for path in sorted((root / "text").iterdir()):
            store.put(path.name, path.read_bytes())
        found: dict[int, int] = {}
        with open_loader(config_of(root, store.url), BYTE_LENGTHS, World()) as loader:
            for step, digest in steps_of(loader):
                found[step] = digest
                if step in (2, 15):
                    server.kill()
                    back = threading.Timer(0.6, server.start)
                    back.start()
                elif step == 14:
                    back.join()
            back.join()
            record = loader.fetch_record()
        assert found == expected
        assert record["data_fetch_s"] > 0.5, "it was down while it was needed"
