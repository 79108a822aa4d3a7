"""A directory as a store: durable, atomic, exact under races, and honest about a full disk."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pretrain.errors import StoreError, UserError
from pretrain.store import ListsSizes, NotFoundError, ReadsInto, Store, UnsupportedError, open_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def files_below(path: Path) -> list[str]:
    """Everything on the disk, what a listing hides too."""
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def python(script: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", script, *args], stdout=subprocess.PIPE, text=True)


def test_paths_and_file_urls_open_the_same_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_store("a b").url == open_store(tmp_path / "a b").url == str(tmp_path / "a b")
    assert open_store(f"file://{tmp_path}/a%20b/").url == str(tmp_path / "a b")
    assert not (tmp_path / "a b").exists()  # made at the first write
    with pytest.raises(UserError, match="The path of a store is empty"):
        open_store("")
    with pytest.raises(UserError, match="A URL at bucket holds a password") as caught:
        open_store("s3://AKIA:hunter2@bucket/runs")
    assert "hunter2" not in str(caught.value)


def test_local_path_is_where_the_file_lies(store: Store) -> None:
    store.put("a/b", b"x")
    path = store.local_path("a/b")
    assert path is not None
    assert path.read_bytes() == b"x"


def test_append_adds_lines_and_creates_the_file(store: Store) -> None:
    store.append("m/x.jsonl", b"1\n")
    store.append("m/x.jsonl", b"2\n")
    assert store.get("m/x.jsonl") == b"1\n2\n"


LIMITED = """
import resource, sys
from pretrain.errors import StoreError
from pretrain.store import open_store
store = open_store(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
for write in (
    lambda: store.put("old", b"n" * (2 << 20)),
    lambda: store.put("fresh", b"n" * (2 << 20)),
    lambda: store.put_stream("old", [b"n" * 1000] * 5000),
    lambda: store.put_if_absent("fresh", b"n" * (2 << 20)),
    lambda: store.append("fresh-log", b"n" * (2 << 20)),
):
    try:
        write()
        print("written")
    except StoreError as error:
        print(error)
"""


def test_a_file_that_does_not_fit_leaves_the_old_content_and_no_temporary_file(store: Store, tmp_path: Path) -> None:
    store.put("old", b"old content")
    process = python(LIMITED, store.url)
    lines = process.communicate(timeout=20)[0].splitlines()
    assert process.returncode == 0
    for line, key in zip(lines, ("old", "fresh", "old", "fresh", "fresh-log"), strict=True):
        assert f"{store.url}/{key}" in line
    assert "(EFBIG). The file would exceed the limit of the process or file system. Raise `ulimit -f`." in lines[0]
    assert "only 1048576 of 2097152 bytes were written" in lines[4]
    assert store.get("old") == b"old content"
    assert files_below(tmp_path) == ["store/fresh-log", "store/old"]


WRITES = {
    "open": lambda store: store.append("log", b"x"),
    "fsync": lambda store: store.put("old", b"new"),
    "replace": lambda store: store.put("old", b"new"),
    "link": lambda store: store.put_if_absent("fresh", b"x"),
}


@pytest.mark.parametrize("call", WRITES)
def test_a_full_disk_is_named_wherever_it_shows(store: Store, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("old", b"old content")

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    text = (
        r"cannot [a-z ]+ .*/\w+: No space left on device \(ENOSPC\)\. The disk is full\. Free space or move the run\."
    )
    with monkeypatch.context() as patch:
        patch.setattr(f"os.{call}", full)
        with pytest.raises(StoreError, match=text):
            WRITES[call](store)
    assert store.get("old") == b"old content"
    assert files_below(Path(store.url)) == ["old"]


def test_a_file_system_without_links_cannot_create_atomically(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("os.link", refuse)
    with pytest.raises(UnsupportedError, match=r"its file system has no hard links.*Put the run on another"):
        store.put_if_absent("a", b"x")
    assert files_below(Path(store.url)) == []


def test_a_file_where_a_folder_is_needed_is_an_error(store: Store) -> None:
    store.put("a", b"x")
    with pytest.raises(StoreError, match=r"cannot write .*/a/b: Not a directory"):
        store.put("a/b", b"x")
    with pytest.raises(StoreError, match=r"cannot append to .*/a/b: Not a directory"):
        store.append("a/b", b"x")
    store.put("folder/file", b"x")
    with pytest.raises(StoreError, match=r"cannot write .*/folder"):
        store.put("folder", b"x")
    assert files_below(Path(store.url)) == ["a", "folder/file"]


HALF_WRITTEN = """
import sys, time
from pretrain.store import open_store
def chunks():
    yield b"half of the new content"
    print("half", flush=True)
    time.sleep(60)
open_store(sys.argv[1]).put_stream("a/file", chunks())
"""


def test_a_writer_killed_in_the_middle_leaves_the_old_file_and_nothing_that_shows(store: Store) -> None:
    store.put("a/file", b"old content")
    process = python(HALF_WRITTEN, store.url)
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)
    assert store.get("a/file") == b"old content"
    assert store.list() == ["a/file"]
    assert store.names("a") == ["file"]
    assert len(files_below(Path(store.url))) == 2  # the half is there, under its temporary name …
    store.delete_tree("a")
    assert files_below(Path(store.url)) == []  # … and goes with its folder


RACER = """
import sys
from pretrain.store import open_store
store, me = open_store(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
won = []
for number in range(60):
    if store.put_if_absent(f"race/{number}", me.encode() * 50_000):
        won.append(str(number))
    seen = store.get(f"race/{number}")
    assert len(seen) == 50_000 and len(set(seen)) == 1, "a half-written file was visible"
print(" ".join(won))
"""


def test_exactly_one_of_several_processes_creates_a_file_and_nobody_sees_half_of_it(store: Store) -> None:
    racers = {
        name: subprocess.Popen(
            [sys.executable, "-c", RACER, store.url, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in "abcd"
    }
    for process in racers.values():
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in racers.values():
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    won = {name: process.communicate(timeout=30)[0].split() for name, process in racers.items()}
    assert all(process.returncode == 0 for process in racers.values())
    assert sorted(int(number) for numbers in won.values() for number in numbers) == list(range(60))
    for name, numbers in won.items():
        assert all(store.get(f"race/{number}") == name.encode() * 50_000 for number in numbers)
    assert len(files_below(Path(store.url))) == 60


def test_a_reader_sees_the_old_file_or_the_new_one_and_never_a_mixture(store: Store) -> None:
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for letter in (b"a", b"b"):
                store.put("file", letter * 200_000)

    store.put("file", b"a" * 200_000)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = [store.get("file") for _ in range(200)]
    finally:
        stop.set()
        writer.join()
    assert {(len(content), len(set(content))) for content in seen} == {(200_000, 1)}


@pytest.mark.parametrize("count", [0, 7, 4001])
def test_sizes_of_few_and_many_files_are_those_of_the_disk(tmp_path: Path, count: int) -> None:
    (tmp_path / "folder.tar").mkdir()
    for number in range(count):
        (tmp_path / f"{number}.tar").write_bytes(bytes(number % 97))
        (tmp_path / f"{number}.idx").touch()
    store = open_store(tmp_path)
    assert isinstance(store, ListsSizes)
    expected = {f"{number}.tar": number % 97 for number in range(count)}
    assert store.sizes(suffix=".tar") == expected | {f"{number}.idx": None for number in range(count)}
    assert store.sizes() == expected | {f"{number}.idx": 0 for number in range(count)}
    assert store.sizes("none") == {}


def test_the_import_is_light() -> None:
    script = (
        "import sys, pretrain.store\n"
        "print(sorted({'torch', 'ray', 'deepspeed', 'fsspec', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    assert python(script).communicate(timeout=20)[0] == "[]\n"


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_a_range_is_read_into_the_callers_memory_whole_or_not_at_all(
    store: Store, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Whatever number of bytes the system gives at once."""
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: preadv(file, [buffers[0][:at_once]], at))
    store.put("a", b"0123456789")
    assert isinstance(store, ReadsInto)
    first, second, third = bytearray(2), bytearray(0), bytearray(4)
    store.get_range_into("a", 3, [memoryview(first), memoryview(second), memoryview(third)])
    assert (bytes(first), bytes(third)) == (b"34", b"5678")
    with pytest.raises(StoreError, match=r"a ends early: 3 of 6 bytes at offset 7"):
        store.get_range_into("a", 7, [memoryview(first), memoryview(third)])
    with pytest.raises(NotFoundError, match=r"b does not exist\."):
        store.get_range_into("b", 0, [memoryview(first)])
    store.put("folder/c", b"x")
    with pytest.raises(NotFoundError, match=r"folder is a directory, where a file is wanted\."):
        store.get_range_into("folder", 0, [memoryview(first)])
