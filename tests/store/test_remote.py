"""What only object stores do, on fsspec's memory file system."""

from __future__ import annotations

import uuid

import fsspec
import pytest

from pretrain.errors import StoreError, UserError
from pretrain.store import Store, UnsupportedError, open_store


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
