"""Checkpoints in S3-compatible stores: whole objects in parts, kills and errors in between, nothing left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pretrain import faults
from pretrain.checkpoint import list_checkpoints, prune, restore, save, verify_checkpoint
from pretrain.checkpoint.retention import Retention
from pretrain.errors import CheckpointError, ExitCode, StoreError
from pretrain.store import open_store
from pretrain.store.multipart import abandoned
from pretrain.store.remote import RemoteStore
from pretrain.topology import World
from tests.checkpoint.flips import Plain
from tests.data_build.servers import s3_server

ROOT = Path(__file__).resolve().parents[2]
MEGABYTE = 2**20


@pytest.fixture(scope="module", params=["moto", "rclone"])
def bucket(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, s3_server(request.param, tmp_path_factory.mktemp("s3"), patch) as url:
        yield url


def pieces(count: int) -> list[memoryview]:
    return [memoryview(np.random.default_rng(n).bytes(8 * MEGABYTE)) for n in range(count)] + [memoryview(b"end")]


def left(store: RemoteStore) -> list[dict[str, str]]:
    return list(abandoned(store._files, store._root))


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_a_large_object_is_its_pieces(bucket: str, count: int) -> None:
    store = RemoteStore(f"{bucket}/large-{count}")
    chunks = pieces(count)
    assert store.put_stream("file", chunks) == count * 8 * MEGABYTE + 3
    assert store.get("file") == b"".join(chunks)
    assert left(store) == []


def test_a_source_or_a_part_that_fails_leaves_nothing(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RemoteStore(f"{bucket}/failing")

    def broken() -> Iterator[memoryview]:
        yield from pieces(5)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        store.put_stream("file", broken())
    original = store._files.call_s3

    def refuse(method: str, *arguments: Any, **fields: Any) -> Any:
        if method == "upload_part" and fields["PartNumber"] == 2:
            raise OSError("InternalError")
        return original(method, *arguments, **fields)

    monkeypatch.setattr(store._files, "call_s3", refuse)
    with pytest.raises(StoreError, match=r"cannot write s3://bucket/failing/file: OSError: InternalError"):
        store.put_stream("file", pieces(5))
    monkeypatch.undo()
    assert store.list() == []
    assert left(store) == []


def test_a_kill_in_the_middle_of_a_save_costs_only_that_save_and_its_parts_are_removed(bucket: str) -> None:
    url = f"{bucket}/run/checkpoints"
    command = [sys.executable, "-m", "tests.checkpoint.s3_saver", url]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["saved\n", "uploading\n"]
        process.kill()
    store = RemoteStore(url)
    assert [info.step for info in list_checkpoints(store) if not info.problem] == [1]
    assert len(left(store)) == 1
    assert store.remove_unfinished() == 1
    assert left(store) == []
    reader = Plain(9, rows=4)
    restored = restore(store, reader, World())
    assert restored is not None
    assert restored.training_state == {"step": 1}
    saved = Plain(1, rows=4)
    assert all(torch.equal(reader.state[n][k], saved.state[n][k]) for n in saved.state for k in saved.state[n])
    name = save(store, saved, step=2, attempt=2, training_state={}, world=World(), guard=lambda: None)
    name.wait()
    assert verify_checkpoint(store, name.name) == []
    prune(store, Retention(1), lambda: None)
    # rclone shows the empty folders of its disk, so the keys are what counts.
    files = ("MANIFEST.json", "rank-00000.json", "rank-00000.safetensors")
    assert store.list() == [f"step-00000002-a002/{file}" for file in files]


def test_a_store_that_is_gone_is_a_failed_save_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server("moto", tmp_path, monkeypatch) as url:
        store = open_store(f"{url}/gone")
        save(store, Plain(1), step=1, attempt=1, training_state={}, world=World(), guard=lambda: None).wait()
    handle = save(store, Plain(1), step=2, attempt=1, training_state={}, world=World(), guard=lambda: None)
    with pytest.raises(StoreError, match=r"cannot write s3://bucket/gone/step-00000002-a001/rank-00000.safetensors"):
        handle.wait()


def test_the_only_checkpoint_that_cannot_be_read_now_is_no_users_error_a_lost_file_is(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose store answers with errors is started again (StoreError), one whose file is lost is not."""
    store = RemoteStore(f"{bucket}/unreadable")
    written = save(store, Plain(1), step=1, attempt=1, training_state={}, world=World(), guard=lambda: None)
    written.wait()
    orders = tmp_path / "orders.json"
    broken = {"point": "store.download", "do": "error:ECONNRESET", "detail": "rank-00000.safetensors", "times": 1000}
    orders.write_text(json.dumps([broken]))
    monkeypatch.setenv(faults.VARIABLE, str(orders))
    faults.arm("rank")
    try:
        reader = Plain(9)
        with pytest.raises(StoreError, match=r"no good checkpoint in .*unreadable") as failed:
            restore(store, reader, World())
        assert failed.value.exit_code == ExitCode.FAILED
        assert not reader.used
    finally:
        monkeypatch.delenv(faults.VARIABLE)
        faults.arm("rank")
    store.delete(f"{written.name}/rank-00000.safetensors")
    with pytest.raises(CheckpointError, match=r"no good checkpoint in .*unreadable") as lost:
        restore(store, reader, World())
    assert lost.value.exit_code == ExitCode.USER_ERROR
