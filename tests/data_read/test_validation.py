"""Validation reads the same rows every time, and its sums depend on neither ranks nor micro-batches."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import pretrain.data.rows as rows_module
from pretrain.data.blocks import CorruptBlockError
from pretrain.data.validation import ValidationSet, open_validation
from pretrain.errors import DataError, StoreError
from pretrain.sequence import IGNORED_LABEL, Batch
from pretrain.topology import World
from tests.data_read.corpus import (
    BYTE_LENGTHS,
    EOS,
    PAIR_CHANGES,
    MemoryStore,
    random_documents,
    random_pairs,
    run_config,
    write_pairs,
    write_tokenizer_file,
    write_tokens,
)

DOCUMENTS = random_documents(25, 14, 4)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("validation")
    tokenizer = write_tokenizer_file(root)
    write_tokens(root / "held", DOCUMENTS, tokenizer)
    write_pairs(root / "pairs", random_pairs(25, 8, 5), tokenizer)
    return root


def held(root: Path, world: World | None = None, source: str = "held", **changes: Any) -> ValidationSet:
    path = {"path": str(root / source)}
    config = run_config(root / "tokenizer.json", {"t": root / source}, data__validation={"v": path}, **changes)
    (name, opened), *rest = open_validation(config, BYTE_LENGTHS, world or World()).items()
    assert (name, rest) == ("v", [])
    return opened


def targets(batches: list[Batch]) -> list[int]:
    return [int(t) for batch in batches for t in batch.labels if t != IGNORED_LABEL]


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 8])
def test_every_pass_holds_every_target_once_whatever_the_micro_batch(root: Path, micro_batch_size: int) -> None:
    expected = [token for document in DOCUMENTS for token in document[1:]]
    validation = held(root, batch__micro_batch_size=micro_batch_size)
    for _ in range(2):
        batches = list(validation.batches())
        assert targets(batches) == expected
        assert sum(b.target_tokens for b in batches) == len(expected)
        assert sum(b.target_bytes for b in batches) == sum(int(BYTE_LENGTHS[t]) for t in expected)
    assert validation.num_rows == -(-sum(map(len, DOCUMENTS)) // 16)


@pytest.mark.parametrize("source", ["held", "pairs"])
@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_ranks_share_the_same_micro_batches_equally(root: Path, source: str, ranks: int) -> None:
    changes = PAIR_CHANGES if source == "pairs" else {}
    alone = {b.index: b.digest for b in held(root, source=source, **changes).batches()}
    split: dict[int, int] = {}
    counts = set()
    for rank in range(ranks):
        validation = held(root, World(rank, ranks, rank, ranks), source, **changes)
        batches = list(validation.batches())
        counts.add(len(batches))
        assert len(batches) == validation.num_batches
        assert all(b.target_tokens == 0 for b in batches if b.index == -1)
        split |= {b.index: b.digest for b in batches if b.index >= 0}
    assert len(counts) == 1
    assert split == alone


def test_fewer_rows_than_ranks_leave_no_rank_without_a_batch(root: Path, tmp_path: Path) -> None:
    write_tokens(tmp_path / "held", [[5, 6, EOS]], root / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_bytes((root / "tokenizer.json").read_bytes())
    batches = [list(held(tmp_path, World(rank, 3, rank, 3)).batches()) for rank in range(3)]
    assert [len(b) for b in batches] == [1, 1, 1]
    assert [targets(b) for b in batches] == [[6, EOS], [], []]


def test_max_rows_keeps_the_first_rows_whatever_the_micro_batch(root: Path) -> None:
    whole = list(held(root, batch__micro_batch_size=1).batches())
    for size in (1, 4):
        some = held(root, batch__micro_batch_size=size, eval__max_rows=5)
        assert some.num_rows == 5
        assert targets(list(some.batches())) == targets(whole[:5])


def test_a_corrupt_block_is_named_or_masked_and_counted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore.of(root / "held")
    body = bytearray(store.files["00000.tar"])
    body[512] ^= 1
    store.files["00000.tar"] = bytes(body)
    monkeypatch.setattr(rows_module, "open_store", lambda path: store)
    with pytest.raises(CorruptBlockError, match="block 0 of source v"):
        list(held(root).batches())
    validation = held(root, data__on_corrupt="mask")
    for _ in range(2):
        remaining = targets(list(validation.batches()))
        assert validation.masked_rows == 4
        assert 0 < len(remaining) < sum(len(d) - 1 for d in DOCUMENTS)


def test_who_waits_for_held_out_rows_says_so_and_gives_up_by_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, signs, make = threading.Event(), list[int](), ValidationSet._batch

    def slow(self: ValidationSet, j: int) -> Batch:
        gate.wait(20)
        return make(self, j)

    def waiting() -> None:
        signs.append(1)
        if len(signs) == 2:
            gate.set()

    expected = [batch.digest for batch in held(root).batches()]
    monkeypatch.setattr(ValidationSet, "_batch", slow)
    assert [batch.digest for batch in held(root).batches(waiting)] == expected
    assert len(signs) >= 2
    gate.clear()
    with pytest.raises(StoreError, match=r"batch 0 of data\.validation\.v did not come within health\.data_timeout_s"):
        list(held(root, health__data_timeout_s=0.2).batches())
    gate.set()


def test_a_validation_source_that_does_not_fit_is_named(root: Path) -> None:
    path = {"path": str(root / "pairs")}
    config = run_config(root / "tokenizer.json", {"t": root / "held"}, data__validation={"v": path})
    with pytest.raises(DataError, match=r"data\.validation\.v is a source of pairs"):
        open_validation(config, BYTE_LENGTHS, World())
