"""What every store promises, whatever lies below; a new kind of store is one more line in `store`."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from pretrain.errors import StoreError
from pretrain.store import NotFoundError, Store, open_store


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "local":
        yield open_store(tmp_path / "store")
        return
    name = f"conformance-{uuid.uuid4().hex}"
    yield open_store(f"memory://{name}/store")
    memory = fsspec.filesystem("memory")
    if memory.exists(f"/{name}"):
        memory.rm(f"/{name}", recursive=True)


def test_what_is_put_is_what_is_got(store: Store) -> None:
    for content in (b"", b"\0", bytes(range(256)) * 1000):
        store.put("deep/er/file", content)
        assert store.get("deep/er/file") == content
        assert store.size("deep/er/file") == len(content)


def test_put_replaces_the_whole_file(store: Store) -> None:
    store.put("a", b"a long content")
    store.put("a", b"short")
    assert store.get("a") == b"short"


def test_put_stream_joins_chunks_and_counts_bytes(store: Store) -> None:
    chunks = [b"one", memoryview(b"two"), memoryview(bytearray(b"\x01\x00\x02\x00")).cast("H"), b""]
    assert store.put_stream("a", iter(chunks)) == 10
    assert store.get("a") == b"onetwo\x01\x00\x02\x00"


def test_a_source_that_fails_in_the_middle_leaves_the_old_content_and_no_trace(store: Store) -> None:
    store.put("a", b"old")

    def chunks() -> Iterator[bytes]:
        yield b"new"
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        store.put_stream("a", chunks())
    with pytest.raises(RuntimeError, match="the source broke"):
        store.put_stream("fresh", chunks())
    assert store.get("a") == b"old"
    assert store.list() == ["a"]


def test_an_absent_key_is_an_error_that_names_it(store: Store) -> None:
    for read in (store.get, store.size, lambda key: store.get_range(key, 0, 1)):
        with pytest.raises(NotFoundError, match=r"store/no/such does not exist\."):
            read("no/such")
    assert not store.exists("no/such")
    assert store.list() == []
    assert store.list("no") == []
    assert store.names("no") == []


def test_a_range_is_exact_or_an_error(store: Store) -> None:
    store.put("a", b"0123456789")
    assert store.get_range("a", 0, 10) == b"0123456789"
    assert store.get_range("a", 3, 4) == b"3456"
    assert store.get_range("a", 10, 0) == b""
    for start, length in ((8, 3), (10, 1), (50, 2)):
        with pytest.raises(StoreError, match=rf"a ends early: \d of {length} bytes at offset {start}"):
            store.get_range("a", start, length)


def test_list_gives_all_keys_below_a_folder_sorted(store: Store) -> None:
    for key in ("b/2", "b/10", "b/c/1", "bc/1", "a"):
        store.put(key, b"x")
    assert store.list() == ["a", "b/10", "b/2", "b/c/1", "bc/1"]
    assert store.list("b") == store.list("b/") == ["b/10", "b/2", "b/c/1"]
    assert store.list("a") == []


def test_names_gives_files_and_folders_right_below(store: Store) -> None:
    for key in ("b/2", "b/c/1", "bc/1", "a"):
        store.put(key, b"x")
    assert store.names() == ["a", "b", "bc"]
    assert store.names("b") == ["2", "c"]
    assert store.names("a") == []


def test_only_files_exist(store: Store) -> None:
    store.put("folder/file", b"x")
    assert store.exists("folder/file")
    assert not store.exists("folder")
    with pytest.raises(NotFoundError):
        store.get("folder")
    with pytest.raises(NotFoundError):
        store.size("folder")


def test_delete_removes_one_file_and_minds_no_absence(store: Store) -> None:
    store.put("a/1", b"x")
    store.put("a/2", b"x")
    store.delete("a/1")
    store.delete("a/1")
    store.delete("a")  # a folder is no file
    assert store.list() == ["a/2"]


def test_delete_tree_removes_one_folder_and_leaves_its_neighbours(store: Store) -> None:
    for key in ("a/1", "a/b/2", "ab/3"):
        store.put(key, b"x")
    store.delete_tree("a")
    store.delete_tree("a")
    assert store.list() == ["ab/3"]
    assert store.names() == ["ab"]


def test_a_child_is_the_store_of_a_folder(store: Store) -> None:
    child = store.child("a/b")
    child.put("c", b"x")
    assert child.url == f"{store.url}/a/b"
    assert store.get("a/b/c") == b"x"
    assert child.list() == child.names() == ["c"]
    assert store.child("").url == store.url


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/", "./a", ".tmp-x", "a/.tmp-x/b"])
def test_a_key_that_could_leave_the_store_is_refused(store: Store, key: str) -> None:
    for use in (store.get, store.exists, store.delete, store.size, lambda key: store.put(key, b"")):
        with pytest.raises(StoreError, match=r"is no key of a store. A key is a relative path"):
            use(key)


def test_errors_pickle(store: Store) -> None:
    with pytest.raises(NotFoundError) as caught:
        store.get("gone")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is NotFoundError
    assert str(copy) == str(caught.value)
