"""The fast way of packing plain text gives what the way for any objective gives, row by row."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pretrain.data.fetch as fetch_module
import pretrain.data.rows as rows_module
from pretrain.data import batch_causal
from pretrain.data.arena import TokenArena
from pretrain.data.blocks import BlockReader, CorruptBlockError
from pretrain.data.format import read_manifest
from pretrain.data.loader import Loader, StepData, open_loader
from pretrain.errors import StoreError
from pretrain.store import open_store
from pretrain.topology import World
from tests.data_read.corpus import (
    BYTE_LENGTHS,
    EOS,
    MemoryStore,
    random_documents,
    run_config,
    write_tokenizer_file,
    write_tokens,
)
from tests.data_read.test_loader import damaged_store


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("arena")
    tokenizer = write_tokenizer_file(root)
    write_tokens(root / "a", random_documents(120, 14, 1), tokenizer)
    write_tokens(root / "b", random_documents(41, 14, 2), tokenizer)
    write_tokens(root / "long", random_documents(30, 200, 3), tokenizer)
    return root


def assert_equal(fast: StepData, slow: StepData) -> None:
    """Compares every field of every batch."""
    assert (fast.digest, fast.target_tokens) == (slow.digest, slow.target_tokens)
    assert (fast.masked_rows, fast.corrupt) == (slow.masked_rows, slow.corrupt)
    for a, b in zip(fast.batches, slow.batches, strict=True):
        assert a.decoder_ids.equal(b.decoder_ids)
        assert a.labels.equal(b.labels)
        assert a.decoder_info.lengths == b.decoder_info.lengths
        assert a.decoder_info.padding == b.decoder_info.padding
        assert a.decoder_info.cu_seqlens.equal(b.decoder_info.cu_seqlens)
        assert a.decoder_info.positions.equal(b.decoder_info.positions)
        assert (a.index, a.dropout_key, a.target_tokens, a.target_bytes, a.digest) == (
            (b.index, b.dropout_key, b.target_tokens, b.target_bytes, b.digest)
        )


def both_ways(loader: Loader, steps: int) -> None:
    """Compares `steps` steps, read one by one."""
    arenas, state = loader._arenas, loader.initial_state()
    assert arenas
    for step in range(steps):
        loader._arenas = arenas
        fast = loader._read(step, state)
        loader._arenas = []
        assert_equal(fast, loader._read(step, state))
        state = loader.next_state(loader.quarantine(state, fast.corrupt))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch__sequence_length": 64, "batch__micro_batch_size": 4, "data__lanes": 1},
        {"batch__sequence_length": 4, "data__lanes": 16, "data__window_blocks": 1},
        {"batch__micro_batch_size": 8, "data__lanes": 1, "data__window_blocks": 1},
    ],
)
@pytest.mark.parametrize("names", [("a",), ("a", "b", "long")])
def test_gathered_batches_equal_those_made_row_by_row(root: Path, names: tuple[str, ...], changes: Any) -> None:
    config = run_config(root / "tokenizer.json", {name: (root / name, 1 + len(name)) for name in names}, **changes)
    with open_loader(config, BYTE_LENGTHS, World()) as loader:  # more than an epoch of b: its padded last rows come by
        both_ways(loader, 14)


def test_without_the_bytes_that_ids_spell_all_else_is_the_same(root: Path) -> None:
    """As training reads: rows with padding come one by one, full ones together."""
    config = run_config(root / "tokenizer.json", {"b": root / "b"})
    with open_loader(config, BYTE_LENGTHS, World()) as counted, open_loader(config, None, World()) as loader:
        state = loader.initial_state()
        for step in range(14):
            told, data = counted.read(step, state), loader.read(step, state)
            assert all(batch.target_bytes > 0 for batch in told.batches)
            bare = tuple(replace(batch, target_bytes=0) for batch in told.batches)
            assert_equal(data, told._replace(batches=bare))
            loader._arenas, kept = [], loader._arenas
            assert_equal(data, loader._read(step, state))
            loader._arenas, state = kept, loader.next_state(state)


@pytest.mark.parametrize(("tokens_per_slice", "tokens_at_once"), [(1, 2**17), (10**9, 1), (64, 150)])
def test_steps_made_together_equal_those_made_row_by_row(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens_per_slice: int, tokens_at_once: int
) -> None:
    """Positions copied and computed, all micro-batches at once, some, and one by one."""
    monkeypatch.setattr(batch_causal, "_TOKENS_PER_SLICE", tokens_per_slice)
    monkeypatch.setattr(batch_causal, "_TOKENS_AT_ONCE", tokens_at_once)
    lengths = [130, 7, 55, 200, 1, 23, 96] * 16  # 8,192 tokens: no block is padded
    documents = [[5 + place % 20 for place in range(length - 1)] + [EOS] for length in lengths]
    write_tokens(tmp_path / "full", documents, root / "tokenizer.json")
    config = run_config(root / "tokenizer.json", {"full": tmp_path / "full"}, batch__sequence_length=32)
    with open_loader(config, BYTE_LENGTHS, World()) as loader:
        states = [loader.initial_state()]
        while len(states) < 7:
            states.append(loader.next_state(states[-1]))
        together = loader._read_steps(list(enumerate(states)))
        assert all(batch.row_tokens is None for step in together for batch in step.batches), "all rows are full"
        loader._arenas = []
        for step, (fast, state) in enumerate(zip(together, states, strict=True)):
            assert_equal(fast, loader._read(step, state))


def test_gathered_batches_of_damaged_blocks_equal_those_made_row_by_row(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = {"a": damaged_store(root, "a", 2), "b": damaged_store(root, "b", 1)}
    monkeypatch.setattr(rows_module, "open_store", lambda path: stores[Path(path).name])
    config = run_config(root / "tokenizer.json", {n: root / n for n in stores}, data__on_corrupt="mask")
    with open_loader(config, BYTE_LENGTHS, World()) as loader:
        both_ways(loader, 20)


def test_a_slot_that_is_used_again_never_mixes_blocks(root: Path) -> None:
    store = open_store(str(root / "a"))
    manifest = read_manifest(store)
    reader = BlockReader(store, manifest)
    whole = np.concatenate([reader.read(block).ids[:64] for block in range(manifest.blocks)])
    rng = np.random.default_rng(0)
    for slots in (1, 2, 5):
        arena = TokenArena(BlockReader(store, manifest), slots)
        for _ in range(20):
            blocks, rows = rng.integers(0, manifest.blocks - 1, 6), rng.integers(0, 4, 6)
            masked = {int(rng.integers(0, manifest.blocks))}
            got = arena.gather(blocks, rows, 16, masked, may_mask=False)
            for number, (block, row) in enumerate(zip(blocks.tolist(), rows.tolist(), strict=True)):
                start = block * 64 + row * 16
                assert got.num_real[number] == (0 if block in masked else 16)
                if block not in masked:
                    assert np.array_equal(got.ids[number], whole[start : start + 17])
                    assert np.array_equal(got.is_end[number], whole[start : start + 16] == 0)


def test_a_damaged_block_on_a_disk_is_never_given_and_its_slot_is_used_again(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(root / "a", tmp_path / "a")
    store = open_store(str(tmp_path / "a"))
    manifest = read_manifest(store)
    good = [BlockReader(store, manifest).read(block) for block in range(manifest.blocks - 1)]
    shard, _ = manifest.locate(2)
    path = tmp_path / "a" / manifest.shards[shard].name
    offset = BlockReader(store, manifest)._place(2).spans[0].offset
    body = bytearray(path.read_bytes())
    body[offset + 7] ^= 4
    path.write_bytes(body)
    arena, rows = TokenArena(BlockReader(store, manifest), 2), np.arange(4)
    for _ in range(3):
        with pytest.raises(CorruptBlockError, match=r"block 2 of source text .*the crc32 of tok\.u2 is not"):
            arena.gather(np.full(4, 2), rows, 16, set(), may_mask=False)
        for block in (0, 1, 3):
            got = arena.gather(np.full(4, block), rows, 16, set(), may_mask=False)
            assert np.array_equal(got.ids[:, :16].ravel(), good[block].ids[:64])
            assert np.flatnonzero(got.is_end).tolist() == (good[block].ends - 1).tolist()
    masked: set[int] = set()
    got = arena.gather(np.array([2, 3]), np.zeros(2, dtype=np.int64), 16, masked, may_mask=True)
    assert (masked, got.num_real.tolist()) == ({2}, [0, 16])
    monkeypatch.setattr(fetch_module, "_LOCAL_WAITS_S", (0.0,))
    late = TokenArena(BlockReader(store, manifest), 2)
    path.write_bytes(body[: offset + 40])  # cut off behind its back
    with pytest.raises(StoreError, match="ends early"):
        late.gather(np.full(4, 2), rows, 16, set(), may_mask=True)


def test_arena_reads_each_block_once_per_window(root: Path) -> None:
    store = MemoryStore.of(root / "a")
    arena = TokenArena(BlockReader(store, read_manifest(store)), 3)
    store.reads.clear()
    for _ in range(5):
        arena.gather(np.array([0, 1, 2, 1]), np.array([0, 1, 2, 3]), 16, set(), may_mask=False)
    assert len(store.reads) == 3


def test_what_is_kept_of_a_batch_stays_as_it_was_and_the_memory_of_dropped_ones_is_used_again(root: Path) -> None:
    documents = [[5 + number % 20] * 31 + [EOS] for number in range(120)]  # they fill their blocks
    write_tokens(root / "full", documents, root / "tokenizer.json")
    config = run_config(root / "tokenizer.json", {"full": root / "full"})
    with open_loader(config, BYTE_LENGTHS, World()) as loader:
        state, places, kept = loader.initial_state(), set(), []
        for step in range(100):
            batch = loader.read(step, state).batches[0]
            places.add(batch.decoder_ids.data_ptr())
            if step in (5, 40, 41):  # of different arrays, as views, and through NumPy
                views = batch.decoder_ids[3:9], batch.labels.view(2, -1)[1], batch.decoder_info.positions.numpy()[::2]
                kept.append((views, [torch.as_tensor(view).clone() for view in views]))
            del batch
            state = loader.next_state(state)
    assert len(places) <= 64
    for views, copies in kept:
        assert all(torch.equal(torch.as_tensor(a), b) for a, b in zip(views, copies, strict=True))
