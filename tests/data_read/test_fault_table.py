"""Faults of every kind at random places: found, or they change nothing. The 1,000 trials: `pytest -m slow` here."""

from __future__ import annotations

import random

import pytest

import pretrain.data.fetch as fetch_module
from pretrain.errors import DataError, StoreError
from pretrain.store import NotFoundError
from tests.data_read.corpus import MemoryStore, random_documents, write_tokenizer_file, write_tokens
from tests.data_read.test_blocks import read_all, read_bytes_of

KINDS = ("flip", "truncate", "missing", "grow", "swap", "short read", "error once", "error")


class FaultyStore(MemoryStore):
    """Fails or shortens reads of ranges: the first one only (`once`), or every one."""

    def __init__(self, files: dict[str, bytes], fault: str, *, once: bool) -> None:
        super().__init__(files)
        self.fault, self.once, self.met = fault, once, 0

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = super().get_range(key, start, length)
        if self.once and self.met:
            return data
        self.met += 1
        if self.fault == "short":
            return data[: length // 2]
        raise StoreError(f"{key}: 500 Internal Server Error.")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> MemoryStore:
    root = tmp_path_factory.mktemp("table")
    write_tokens(root / "text", random_documents(60, 12, 4), write_tokenizer_file(root))
    return MemoryStore.of(root / "text")


def damaged(good: MemoryStore, kind: str, pick: random.Random) -> tuple[MemoryStore, bool]:
    """A store with one fault, and whether reading must fail."""
    name = pick.choice(sorted(good.files))
    body = good.files[name]
    if kind == "flip":
        offset = pick.randrange(len(body))
        changed = bytearray(body)
        changed[offset] ^= 1 << pick.randrange(8)
        covered = read_bytes_of(good)
        return MemoryStore({**good.files, name: bytes(changed)}), name not in covered or offset in covered[name]
    if kind == "truncate":
        kept = pick.randrange(len(body) - 1)  # a manifest without its last newline says the same
        return MemoryStore({**good.files, name: body[:kept]}), True
    if kind == "grow":
        return MemoryStore({**good.files, name: body + b"\xff"}), True
    if kind == "missing":
        return MemoryStore({key: value for key, value in good.files.items() if key != name}), True
    if kind == "swap":  # whole files with good checksums, in each other's place
        suffix = pick.choice((".tar", ".idx"))
        first, second = pick.sample(sorted(key for key in good.files if key.endswith(suffix)), 2)
        return MemoryStore({**good.files, first: good.files[second], second: good.files[first]}), True
    if kind == "short read":
        return FaultyStore(good.files, "short", once=pick.random() < 0.5), False
    return FaultyStore(good.files, "500", once=kind == "error once"), kind == "error"


def run_trials(good: MemoryStore, seeds: range) -> dict[str, int]:
    """Faults found by kind. A read either fails or gives exactly what was written."""
    whole = read_all(good)
    found = dict.fromkeys(KINDS, 0)
    for seed in seeds:
        pick = random.Random(seed)
        kind = KINDS[seed % len(KINDS)]
        store, must_fail = damaged(good, kind, pick)
        try:
            got = read_all(store)
        except (DataError, StoreError, NotFoundError):
            found[kind] += 1
            continue
        assert not must_fail, f"trial {seed}: {kind} went unnoticed"
        assert got == whole, f"trial {seed}: {kind} changed what was read"
    return found


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "_LOCAL_WAITS_S", (0.0, 0.0))


def test_no_fault_is_silent(good: MemoryStore) -> None:
    found = run_trials(good, range(80))
    assert found["error once"] == 0
    assert all(found[kind] == 10 for kind in ("truncate", "grow", "missing", "swap", "error"))


@pytest.mark.slow
def test_none_of_a_thousand_faults_is_silent(good: MemoryStore) -> None:
    found = run_trials(good, range(1000))
    assert found["error once"] == 0
    assert all(found[kind] == 125 for kind in ("truncate", "grow", "missing", "swap", "error"))
    assert found["flip"] > 60
