"""What only object stores do, on fsspec's memory file system."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

import pretrain.store.remote as remote_module
from pretrain.errors import StoreError, UserError
from pretrain.store import Store, UnsupportedError, open_store
from tests.data_build.servers import s3_server


@pytest.fixture
def store() -> Store:
    return open_store(f"memory://remote-{uuid.uuid4().hex}")


def test_what_an_object_store_cannot_do_is_said(store: Store) -> None:
    with pytest.raises(UnsupportedError, match=r"cannot create a atomically.*Put the run on a shared file system"):
        store.put_if_absent("a", b"")
    with pytest.raises(UnsupportedError, match=r"cannot append to a. Objects are written whole"):
        store.append("a", b"")
    assert store.local_path("a") is None


def test_an_unknown_kind_of_url_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"url=nosuch://x cannot be opened: .*[Ii]nstall"):
        open_store("nosuch://x")


def test_a_failure_of_the_client_library_names_url_and_cause(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    class OddError(Exception):
        pass

    def fail(*args: object, **kwargs: object) -> None:
        raise OddError("connection reset")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "pipe_file", fail)
    with pytest.raises(StoreError, match=r"cannot write memory://remote-\w+/a: OddError: connection reset\. Check the"):
        store.put("a", b"x")


def test_s3_creates_a_key_once_among_many_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "_HONOURS_CONDITION", {})
    with s3_server("moto", tmp_path / "s3", monkeypatch) as bucket:
        stores = [open_store(f"{bucket}/run") for _ in range(6)]
        with ThreadPoolExecutor(6) as pool:
            won = list(pool.map(lambda pair: pair[1].put_if_absent("lease/1", b"%d" % pair[0]), enumerate(stores)))
        assert sum(won) == 1
        assert stores[0].get("lease/1") == b"%d" % won.index(True)
        assert not stores[0].put_if_absent("lease/1", stores[0].get("lease/1"))  # equal content is no victory
        assert stores[0].list() == ["lease/1"]  # the probe is gone


def test_a_store_that_ignores_the_condition_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "_HONOURS_CONDITION", {})
    with s3_server("rclone", tmp_path / "s3", monkeypatch) as bucket:
        store = open_store(f"{bucket}/run")
        with pytest.raises(UnsupportedError, match="this store does not promise that"):
            store.put_if_absent("lease/1", b"x")
        assert store.list() == []
