"""Damage of every kind is found before a wrong token is delivered."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pretrain.data.fetch as fetch_module
from pretrain.data.batch import BatchShape
from pretrain.data.blocks import BlockReader, CorruptBlockError, PairBlock, TokenBlock
from pretrain.data.cache import BlockCache
from pretrain.data.format import MANIFEST_NAME, ShardIndex, read_manifest
from pretrain.data.rows import SourceRows
from pretrain.errors import DataError, StoreError
from pretrain.store import open_store
from tests.data_read.corpus import (
    EOS,
    PAD,
    START,
    MemoryStore,
    random_documents,
    random_pairs,
    write_pairs,
    write_tokenizer_file,
    write_tokens,
)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "_LOCAL_WAITS_S", (0.0, 0.0, 0.0))


@pytest.fixture(scope="module", params=["tokens", "pairs"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MemoryStore:
    directory = tmp_path_factory.mktemp(request.param)
    tokenizer = write_tokenizer_file(directory)
    if request.param == "tokens":
        write_tokens(directory / "out", random_documents(60, 12), tokenizer)
    else:
        write_pairs(directory / "out", random_pairs(60, 8), tokenizer)
    return MemoryStore.of(directory / "out")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> MemoryStore:
    directory = tmp_path_factory.mktemp("text")
    write_tokens(directory / "out", random_documents(60, 12), write_tokenizer_file(directory))
    return MemoryStore.of(directory / "out")


def read_all(store: Any) -> list[Any]:
    """Everything that training and explain could ever take from a source."""
    manifest = read_manifest(store)
    reader = BlockReader(store, manifest)
    length = manifest.target_capacity or 16
    shape = BatchShape(2, length, manifest.source_capacity or None, PAD, START)
    rows = SourceRows("text", reader, shape)
    out: list[Any] = []
    for block in range(manifest.blocks):
        out.append(reader.provenance(block))
        for row in range(rows.rows_per_block):
            packed = rows.row(block, row)
            out += [packed.decoder_ids.tolist(), packed.labels.tolist(), packed.lengths.tolist()]
            if packed.encoder_ids is not None and packed.encoder_lengths is not None:
                out += [packed.encoder_ids.tolist(), packed.encoder_lengths.tolist()]
    return out


def read_bytes_of(store: MemoryStore) -> dict[str, set[int]]:
    """Offsets of every tar that an index leads to: what is outside are headers, fill and the archive's end."""
    manifest = read_manifest(store)
    covered: dict[str, set[int]] = {}
    for number, shard in enumerate(manifest.shards):
        index = ShardIndex.from_bytes(store.files[shard.name + ".idx"], manifest, number, "index")
        spans = [index.span(row, m) for row in range(len(index)) for m in range(len(manifest.members))]
        covered[shard.name] = {i for span in spans for i in range(span.offset, span.offset + span.length)}
    return covered


def test_every_flipped_bit_is_found_or_lies_where_nobody_reads(source: MemoryStore) -> None:
    good, covered = read_all(source), read_bytes_of(source)
    pick = random.Random(5)
    names = {
        "manifest": [MANIFEST_NAME],
        "index": [n for n in source.files if n.endswith(".idx")],
        "tar": sorted(covered),
    }
    found = dict.fromkeys(names, 0)
    for _ in range(100):
        for kind, of_kind in names.items():
            name = pick.choice(of_kind)
            offset, bit = pick.randrange(len(source.files[name])), pick.randrange(8)
            damaged = bytearray(source.files[name])
            damaged[offset] ^= 1 << bit
            store = MemoryStore({**source.files, name: bytes(damaged)})
            if name in covered and offset not in covered[name]:
                assert read_all(store) == good, f"{name} byte {offset} is read after all"
                continue
            with pytest.raises(DataError):
                read_all(store)
            found[kind] += 1
    assert found["manifest"] == found["index"] == 100
    assert 5 <= found["tar"] < 100


def test_what_is_delivered_is_what_was_written(tmp_path: Path) -> None:
    documents = random_documents(50, 20, seed=2)
    manifest = write_tokens(tmp_path / "out", documents, write_tokenizer_file(tmp_path))
    reader = BlockReader(MemoryStore.of(tmp_path / "out"), manifest)
    stream, ends = [], []
    for number in range(manifest.blocks):
        block = reader.read(number)
        assert isinstance(block, TokenBlock)
        stream += block.ids[: block.real_tokens].tolist()
        ends += (block.ends + number * 64).tolist()
        if number + 1 < manifest.blocks:
            following = reader.read(number + 1)
            assert block.ids[-1] == following.ids[0]
    assert stream == [token for document in documents for token in document]
    assert ends == np.cumsum([len(d) for d in documents]).tolist()


def test_pair_rows_are_the_rows_that_were_packed(tmp_path: Path) -> None:
    packed = write_pairs(tmp_path / "out", random_pairs(70, 8), write_tokenizer_file(tmp_path))
    store = MemoryStore.of(tmp_path / "out")
    reader = BlockReader(store, read_manifest(store))
    assert isinstance(reader.read(0), PairBlock)
    rows = SourceRows("pairs", reader, BatchShape(2, 16, 24, PAD, START))
    assert rows.count_real_rows() == len(packed.rows) < rows.num_rows
    for number in range(rows.num_rows):
        row = rows.row(*divmod(number, 4))
        pairs = packed.rows[number] if number < len(packed.rows) else []
        assert row.encoder_ids is not None
        assert row.encoder_ids.tolist() == [t for s, _ in pairs for t in s]
        assert row.labels.tolist() == [t for _, target in pairs for t in target]
        assert row.decoder_ids.tolist() == [t for _, target in pairs for t in [START, *target[:-1]]]


def test_missing_and_truncated_shards_are_all_named_at_open(text: MemoryStore) -> None:
    files = dict(text.files)
    del files["00001.tar"]
    files["00000.tar"] = files["00000.tar"][:-700]
    with pytest.raises(DataError, match=r"not whole: 00000\.tar has \d+ bytes, not \d+; 00001\.tar is missing"):
        read_all(MemoryStore(files))


def test_an_empty_shard_is_named_and_so_is_a_missing_index(text: MemoryStore) -> None:
    with pytest.raises(DataError, match=r"00000\.tar has 0 bytes"):
        read_all(MemoryStore({**text.files, "00000.tar": b""}))
    files = dict(text.files)
    del files["00001.tar.idx"]
    with pytest.raises(DataError, match=r"00001\.tar\.idx is missing"):
        read_all(MemoryStore(files))


def test_an_index_of_another_shard_is_refused(text: MemoryStore) -> None:
    with pytest.raises(DataError, match=r"00000\.tar\.idx is damaged"):
        read_all(MemoryStore({**text.files, "00000.tar.idx": text.files["00001.tar.idx"]}))


class Flaky(MemoryStore):
    """Gives `bad` answers before each good one."""

    def __init__(self, files: dict[str, bytes], bad: int, kind: str) -> None:
        super().__init__(files)
        self.left, self.kind = bad, kind

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = super().get_range(key, start, length)
        if self.left:
            self.left -= 1
            if self.kind == "error":
                raise StoreError("the network is away.")
            return data[:-9] if self.kind == "short" else bytes([data[0] ^ 1]) + data[1:]
        return data


@pytest.mark.parametrize("kind", ["short", "flip"])
def test_a_bad_answer_is_fetched_once_more_and_a_second_one_is_corruption(text: MemoryStore, kind: str) -> None:
    manifest = read_manifest(text)
    store = Flaky(text.files, 1, kind)
    good = BlockReader(text, manifest).read(0)
    assert all(np.array_equal(a, b) for a, b in zip(BlockReader(store, manifest).read(0), good, strict=True))
    assert len(store.reads) == 2
    store = Flaky(text.files, 2, kind)
    reader = BlockReader(store, manifest, name="mine")
    with pytest.raises(
        CorruptBlockError, match=r"block 0 of source mine \(shard memory://source/00000\.tar\)"
    ) as caught:
        reader.read(0)
    assert (caught.value.source, caught.value.block) == ("mine", 0)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.source, again.block) == (str(caught.value), "mine", 0)
    with pytest.raises(CorruptBlockError):  # settled, though the store would now answer well
        reader.read(0)
    assert len(store.reads) == 2
    assert reader.read(1) is not None


@pytest.mark.parametrize(("bad", "comes"), [(3, True), (4, False)])
def test_a_failing_store_is_asked_four_times_and_never_taken_for_corruption(
    text: MemoryStore, bad: int, comes: bool
) -> None:
    reader = BlockReader(Flaky(text.files, bad, "error"), read_manifest(text))
    if comes:
        assert reader.read(0) is not None
        return
    with pytest.raises(StoreError, match="the network is away"):
        reader.read(0)
    assert reader.read(0) is not None


def test_waits_between_tries_grow_and_differ_so_that_ranks_do_not_come_back_together(
    text: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, longest = list[float](), (1.0, 4.0, 16.0)
    monkeypatch.setattr(fetch_module, "_REMOTE_WAITS_S", longest)
    monkeypatch.setattr(fetch_module.time, "sleep", waits.append)
    for _ in range(8):
        store = Flaky(text.files, 3, "error")
        store.remote = True
        BlockReader(store, read_manifest(store)).read(0)
    for most, of_readers in zip(longest, np.array(waits).reshape(8, 3).T.tolist(), strict=True):
        assert all(most / 2 <= wait <= most for wait in of_readers)
        assert len(set(of_readers)) == 8


def test_ids_and_ends_that_a_right_checksum_hides_are_refused_by_block(text: MemoryStore) -> None:
    manifest = read_manifest(text)
    used = max(int(BlockReader(text, manifest).read(block).ids.max()) for block in range(manifest.blocks))
    reader = BlockReader(text, replace(manifest, vocabulary_size=used))
    with pytest.raises(DataError, match=rf"block \d+ of source text .* \(id {used} outside the vocabulary of {used}\)"):
        list(map(reader.read, range(manifest.blocks)))
    with pytest.raises(DataError, match=r"block 0 .* breaks the format"):
        BlockReader(text, replace(manifest, block_tokens=32)).read(0)


def test_blocks_stay_in_memory_least_recently_used_out_first(text: MemoryStore) -> None:
    store = MemoryStore(text.files)
    reader = BlockReader(store, read_manifest(store), kept_blocks=2)
    for block in (0, 1, 0, 2, 0, 1):
        reader.read(block)
    assert len(store.reads) == 4


def test_a_remote_block_comes_from_the_cache_the_second_time(text: MemoryStore, tmp_path: Path) -> None:
    manifest = read_manifest(text)
    for expected in (3, 0):
        store = MemoryStore(text.files, remote=True)
        reader = BlockReader(store, manifest, cache=BlockCache(tmp_path, 10**6))
        assert [reader.read(block) is not None for block in range(3)] == [True] * 3
        assert len(store.reads) == expected == reader.counts.requests
        assert reader.counts.cache_hits == 3 - expected


def test_a_damaged_cache_entry_is_fetched_again(text: MemoryStore, tmp_path: Path) -> None:
    manifest = read_manifest(text)
    first = BlockReader(MemoryStore(text.files, remote=True), manifest, cache=BlockCache(tmp_path, 10**6)).read(0)
    (entry,) = tmp_path.glob("*/*.block")
    entry.write_bytes(b"x" + entry.read_bytes()[1:])
    store = MemoryStore(text.files, remote=True)
    again = BlockReader(store, manifest, cache=BlockCache(tmp_path, 10**6)).read(0)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert len(store.reads) == 1
    store = MemoryStore(text.files, remote=True)
    BlockReader(store, manifest, cache=BlockCache(tmp_path, 10**6)).read(0)
    assert store.reads == []


def test_the_cache_keeps_its_budget_and_the_entries_used_last(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 1000)
    for number in range(30):
        cache.put(f"{number:02d}key", bytes(100))
        assert cache.get("00key") is not None
    kept = sorted(path.name[:2] for path in tmp_path.glob("*/*.block"))
    assert len(kept) <= 10
    assert {"00", "29"} <= set(kept)


def test_a_cache_that_cannot_write_says_so_once_and_reading_goes_on(
    text: MemoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not a directory")
    store = MemoryStore(text.files, remote=True)
    reader = BlockReader(store, read_manifest(store), cache=BlockCache(tmp_path / "file", 10**6))
    for block in range(3):
        reader.read(block)
    assert capsys.readouterr().err.count("takes no more blocks") == 1


def test_of_many_shards_all_sizes_are_checked_at_open_and_an_index_when_it_is_used(tmp_path: Path) -> None:
    documents = [[3 + number % 90] * 63 + [EOS] for number in range(70)]
    write_tokens(tmp_path, documents, write_tokenizer_file(tmp_path), shard_blocks=1)
    store = open_store(tmp_path)
    manifest = read_manifest(store)
    assert len(manifest.shards) == 70
    reader = BlockReader(store, manifest)
    for block in (0, 33, 69):
        content = reader.read(block)
        assert isinstance(content, TokenBlock)
        assert content.ids[:64].tolist() == documents[block]
    (tmp_path / "00003.tar.idx").write_bytes(bytes((tmp_path / "00003.tar.idx").stat().st_size))
    (tmp_path / "00004.tar.idx").write_bytes((tmp_path / "00004.tar.idx").read_bytes()[:-8])
    (tmp_path / "00005.tar.idx").unlink()
    (tmp_path / "00011.tar").unlink()
    with (tmp_path / "00012.tar").open("ab") as file:
        file.write(b"more")
    with pytest.raises(DataError, match=r"not whole: 00011\.tar is missing; 00012\.tar has \d+ bytes, not \d+; "
                                        r"00005\.tar\.idx is missing\. All 70 shards"):  # fmt: skip
        BlockReader(store, manifest)
    with pytest.raises(DataError, match=r"00003\.tar\.idx is damaged"):
        reader.read(3)
    with pytest.raises(DataError, match=r"00004\.tar\.idx is damaged"):
        reader.read(4)
