"""The history of a run: checked, ordered by lease and number, closed to fenced writers."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from pretrain.errors import FencedError, StoreError
from pretrain.rundir import DamagedFileError, EventKind, Lease
from pretrain.rundir.journal import JournalWriter, read_events
from pretrain.rundir.records import decode_record, encode_record
from pretrain.rundir.status import read_status
from pretrain.store import Store, open_store
from pretrain.store.local import LocalStore
from tests.rundir.helpers import flip_bits


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "run")


def kinds(store: Store, *, fenced: bool = False) -> list[tuple[int, int, str]]:
    return [(event.lease, event.seq, event.kind) for event in read_events(store, fenced=fenced)]


def test_events_come_back_in_order_with_their_fields(store: Store) -> None:
    writer = JournalWriter(store, Lease.acquire(store, purpose="training"))
    written = writer.append("created")
    writer.append(EventKind.COMMITTED, attempt=1, step=10, checkpoint="step-00000010-a001")
    events = read_events(store)
    assert events[0] == written
    assert (events[1].kind, events[1].lease, events[1].seq) == ("committed", 1, 2)
    assert events[1].fields == {"attempt": 1, "step": 10, "checkpoint": "step-00000010-a001"}
    assert events[1].t >= events[0].t
    assert store.list("journal") == ["journal/000001/00000001.json", "journal/000001/00000002.json"]


def test_a_run_without_a_journal_has_no_events(store: Store) -> None:
    assert read_events(store) == []


def test_numbers_that_json_lacks_become_text(store: Store) -> None:
    JournalWriter(store, Lease.acquire(store, purpose="t")).append(
        "fault", message="x", loss=float("nan"), top=[float("inf")]
    )
    assert read_events(store)[0].fields == {"message": "x", "loss": "nan", "top": ["inf"]}


def test_an_unknown_kind_is_a_programming_error(store: Store) -> None:
    writer = JournalWriter(store, Lease.acquire(store, purpose="training"))
    with pytest.raises(ValueError, match="'exploded' is not a valid EventKind"):
        writer.append("exploded")
    assert read_events(store) == []


def test_a_fenced_lease_cannot_append(store: Store) -> None:
    old = JournalWriter(store, Lease.acquire(store, purpose="training"))
    old.append("created")
    Lease.acquire(store, purpose="another", takeover=True)
    with pytest.raises(FencedError, match="lease 2 is newer than lease 1"):
        old.append("committed", step=5)
    assert kinds(store) == [(1, 1, "created")]


def test_what_a_fenced_writer_still_manages_to_add_is_dropped(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Lease.acquire(store, purpose="one"), Lease.acquire(store, purpose="two", takeover=True)
    monkeypatch.setattr(first, "check", lambda: None)  # it looked just before the take-over, and wrote just after
    monkeypatch.setattr(second, "check", lambda: None)
    old = JournalWriter(store, first)
    old.append("created")
    old.append("attempt_started", attempt=1)
    middle = JournalWriter(store, second)
    old.append("committed", step=1)  # after the newer one had looked: late, whatever the clocks say
    middle.append("attempt_started", attempt=2)
    old.append("committed", step=2)
    third = Lease.acquire(store, purpose="three", takeover=True)
    newest = JournalWriter(store, third)
    middle.append("committed", step=3)
    old.append("committed", step=4)
    newest.append("attempt_started", attempt=3)
    valid = [(1, 1, "created"), (1, 2, "attempt_started"), (2, 1, "attempt_started"), (3, 1, "attempt_started")]
    assert kinds(store) == valid
    assert [event.fields.get("step") for event in read_events(store, fenced=True)] == [
        None, None, 1, 2, 4, None, 3, None,
    ]  # fmt: skip
    store.delete("journal/000002/00000001.json")  # what each event knows is in each of them
    assert kinds(store) == [(1, 1, "created"), (1, 2, "attempt_started"), (3, 1, "attempt_started")]


def test_an_older_lease_without_a_successor_s_event_still_counts(store: Store) -> None:
    JournalWriter(store, Lease.acquire(store, purpose="one")).append("created")
    Lease.acquire(store, purpose="two", takeover=True)
    assert kinds(store) == [(1, 1, "created")]


def test_two_writers_of_one_lease_and_many_threads_never_lose_an_event(store: Store) -> None:
    lease = Lease.acquire(store, purpose="training")
    writers = [JournalWriter(store, lease), JournalWriter(store, lease)]

    def write(number: int) -> None:
        for step in range(10):
            writers[number % 2].append("committed", step=step, thread=number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = read_events(store)
    assert [event.seq for event in events] == list(range(1, 41))
    for number in range(4):
        assert [event.fields["step"] for event in events if event.fields["thread"] == number] == list(range(10))
    assert JournalWriter(store, lease).append("completed", step=10).seq == 41


def test_any_flipped_bit_in_an_event_is_an_error_that_names_its_file_and_the_remedy_works(store: Store) -> None:
    writer = JournalWriter(store, Lease.acquire(store, purpose="training"))
    writer.append("created")
    writer.append("committed", step=7, checkpoint="step-00000007-a001")
    writer.append("completed", step=9)
    key = "journal/000001/00000002.json"
    path = Path(store.url) / key
    for content in flip_bits(path, every=11):
        path.write_bytes(content)
        with pytest.raises(DamagedFileError) as caught:
            read_events(store)
        assert str(caught.value).startswith(f"{path} is damaged: ")
        assert "Restore it from a backup, or delete it: only this record of the history is lost" in str(caught.value)
    store.delete(key)
    assert kinds(store) == [(1, 1, "created"), (1, 3, "completed")]


def test_every_flipped_bit_of_a_record_is_found_or_changes_nothing(tmp_path: Path) -> None:
    body = {"text": "läuft ~ 1e-5", "number": 1e-05, "list": [1, None, True], "deep": {"a": {}}}
    path = tmp_path / "record.json"
    path.write_bytes(encode_record(body))
    found = 0
    contents = flip_bits(path)
    for content in contents:
        try:
            # The two exceptions: 1E-05 is the same number as 1e-05, \u00E4 the same letter as \u00e4.
            assert decode_record(content, "f", "Restore it.") == body
        except DamagedFileError:
            found += 1
    assert found >= len(contents) - 2


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"null", b'{"body": 1, "sha256": "x"}', b"\xff\xfe", b"[" * 9999]
)
def test_what_is_no_record_is_damaged(content: bytes) -> None:
    with pytest.raises(DamagedFileError, match=r"^f is damaged: it is not a record of JSON\. .* Restore it\.$"):
        decode_record(content, "f", "Restore it.")


class FullDisk(LocalStore):
    """A directory on a disk of so many bytes: what does not fit fails as the kernel says it."""

    capacity = 1 << 20

    def put_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        data = b"".join(bytes(chunk) for chunk in chunks)
        self._fit(len(data))
        return super().put_stream(key, [data])

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self._fit(len(data))
        return super().put_if_absent(key, data)

    def _fit(self, length: int) -> None:
        used = sum(path.stat().st_size for path in Path(self.url).rglob("*") if path.is_file())
        if used + length > self.capacity:
            raise StoreError(f"cannot write: {os.strerror(errno.ENOSPC)}")


def test_a_full_disk_has_room_for_the_end_of_the_run_and_the_release_of_its_lease(tmp_path: Path) -> None:
    store = FullDisk(tmp_path / "run")
    lease = Lease.acquire(store, purpose="training")
    writer = JournalWriter(store, lease)
    writer.append("created")
    writer.append(EventKind.ATTEMPT_STARTED, attempt=1, ranks=1, host="h", why="first start")
    store.put("junk/file", bytes(_room(store)))  # something else fills the disk to the last byte
    with pytest.raises(StoreError, match="No space left on device"):
        writer.append(EventKind.COMMITTED, attempt=1, step=10, checkpoint="step-00000010-a001")
    writer.append(EventKind.FAILED, reason="no space left on device", exit_code=3)
    lease.release()
    status = read_status(store, "run", 100)
    assert (status.state, status.reason) == ("failed", "no space left on device")
    # With space again, the next start has its reserve again.
    store.delete_tree("junk")
    JournalWriter(store, Lease.acquire(store, purpose="training"))
    assert store.size("disk-reserve") == 64 * 1024


def _room(store: FullDisk) -> int:
    return store.capacity - sum(path.stat().st_size for path in Path(store.url).rglob("*") if path.is_file())
