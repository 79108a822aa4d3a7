"""The loader delivers the same rows whoever reads, in whatever order, after whatever happened."""

from __future__ import annotations

import gc
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset

import pretrain.data.rows as rows_module
from pretrain.config.schema import RunConfig
from pretrain.data.batch import sum_digests
from pretrain.data.blocks import CorruptBlockError
from pretrain.data.loader import Loader, StepData, open_loader
from pretrain.data.state import DataState
from pretrain.errors import DataError, StoreError
from pretrain.sequence import Batch
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


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two text sources, one of pairs, one of numbered rows."""
    root = tmp_path_factory.mktemp("sources")
    tokenizer = write_tokenizer_file(root)
    write_tokens(root / "a", random_documents(120, 14, 1), tokenizer)
    write_tokens(root / "b", random_documents(40, 14, 2), tokenizer)
    write_pairs(root / "pairs", random_pairs(120, 8, 3), tokenizer)
    # Row k of 16 tokens begins with its own number, so that rows can be told apart wherever they turn up.
    numbered = [[100 + k, *[50] * 14, EOS] for k in range(32)]
    write_tokens(root / "numbered", numbered, tokenizer)
    return root


def two(root: Path, **changes: Any) -> RunConfig:
    return run_config(root / "tokenizer.json", {"a": (root / "a", 0.7), "b": (root / "b", 0.3)}, **changes)


def pairs(root: Path, **changes: Any) -> RunConfig:
    return run_config(root / "tokenizer.json", {"p": root / "pairs"}, **PAIR_CHANGES, **changes)


def numbered(root: Path, **changes: Any) -> RunConfig:
    return run_config(root / "tokenizer.json", {"n": root / "numbered"}, **changes)


def steps_of(loader: Loader, count: int, state: DataState | None = None, first: int = 0) -> list[StepData]:
    state = state or loader.initial_state()
    out = []
    for step in range(first, first + count):
        out.append(loader.read(step, state))
        state = loader.next_state(state)
    return out


def read_run(config: RunConfig, count: int, world: World | None = None) -> list[StepData]:
    with open_loader(config, BYTE_LENGTHS, world or World()) as loader:
        return steps_of(loader, count)


def same(a: Batch, b: Batch) -> bool:
    return (
        (a.index, a.dropout_key, a.target_tokens, a.target_bytes, a.digest)
        == (b.index, b.dropout_key, b.target_tokens, b.target_bytes, b.digest)
        and a.decoder_info.lengths == b.decoder_info.lengths
        and torch.equal(a.decoder_ids, b.decoder_ids)
        and torch.equal(a.labels, b.labels)
        and (a.encoder_ids is None) == (b.encoder_ids is None)
        and (a.encoder_ids is None or b.encoder_ids is None or torch.equal(a.encoder_ids, b.encoder_ids))
    )


def ids_of(data: StepData) -> list[int]:
    """Numbers of the rows of a step of the numbered source."""
    return [int(t) - 100 for batch in data.batches for t in batch.decoder_ids if t >= 100]


@pytest.mark.parametrize("kind", ["tokens", "pairs"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_any_number_of_ranks_reads_the_same_micro_batches(root: Path, kind: str, ranks: int) -> None:
    config = two(root) if kind == "tokens" else pairs(root)
    alone = read_run(config, 6)
    split = [read_run(config, 6, World(rank, ranks, rank, ranks)) for rank in range(ranks)]
    for step, whole in enumerate(alone):
        parts = [rank[step] for rank in split]
        assert {len(part.batches) for part in parts} == {-(-4 // ranks)}
        real = sorted((b for part in parts for b in part.batches if b.index >= 0), key=lambda b: b.index)
        assert all(same(ours, theirs) for ours, theirs in zip(real, whole.batches, strict=True))
        assert [b.index for part in parts for b in part.batches].count(-1) == -(-4 // ranks) * ranks - 4
        assert sum_digests(part.digest for part in parts) == whole.digest
        assert sum(part.target_tokens for part in parts) == whole.target_tokens > 0


def test_every_numbered_row_comes_once_per_epoch_for_any_ranks(root: Path) -> None:
    for ranks in (1, 2, 3):
        seen: list[int] = []
        for rank in range(ranks):
            for data in read_run(numbered(root), 8, World(rank, ranks, rank, ranks))[:4]:
                seen += ids_of(data)
        assert sorted(seen) == list(range(32))


def test_epochs_differ_and_the_seed_decides(root: Path) -> None:
    ids = [i for data in read_run(numbered(root), 12) for i in ids_of(data)]
    epochs = [ids[i : i + 32] for i in (0, 32, 64)]
    assert all(sorted(epoch) == list(range(32)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert [i for data in read_run(numbered(root), 12) for i in ids_of(data)] == ids
    assert [i for data in read_run(numbered(root, seed=8), 12) for i in ids_of(data)] != ids


@pytest.mark.parametrize("prefetch", [1, 4])
def test_stopping_again_and_again_replays_and_loses_no_row(root: Path, prefetch: int) -> None:
    config = numbered(root, data__prefetch_steps=prefetch)
    whole = read_run(config, 14)
    step, parts, saved = 0, [], None
    for count in (3, 1, 6, 4):  # within the first epoch twice, then in the second and third; ranks change too
        with open_loader(config, BYTE_LENGTHS, World()) as loader:
            state = loader.initial_state() if saved is None else loader.resume(DataState.from_json(json.loads(saved)))
            for _ in range(count):
                parts.append(loader.read(step, state))
                state = loader.next_state(state)
                step += 1
            saved = json.dumps(state.to_json())  # what the trainer consumed, whatever was read ahead
    assert [p.digest for p in parts] == [w.digest for w in whole]
    assert [ids_of(p) for p in parts] == [ids_of(w) for w in whole]


def test_random_access_equals_iteration(root: Path) -> None:
    whole = read_run(two(root), 8)
    with open_loader(two(root), BYTE_LENGTHS, World()) as loader:
        states = [loader.initial_state()]
        for _ in range(7):
            states.append(loader.next_state(states[-1]))
        for step in (5, 0, 5, 7, 6, 1, 2, 3):
            assert loader.read(step, states[step]).digest == whole[step].digest


def test_mixing_is_exact(root: Path) -> None:
    config = two(root, data__lanes=1)
    with open_loader(config, BYTE_LENGTHS, World()) as loader:
        state = loader.initial_state()
        text = loader.describe()
    assert "7 of 10 rows" in text
    assert "3 of 10 rows" in text
    assert state.segment.sources[0].weight == 0.7
    from pretrain.data.segments import order_of

    counts = Counter(a.source for a in order_of(state.segments, state.seed).locate_range(0, 1000))
    assert counts == {0: 700, 1: 300}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the library leaves tars open
def test_rows_equal_what_the_stock_webdataset_library_reads(root: Path) -> None:
    urls = [str(path) for path in sorted((root / "a").glob("*.tar"))]
    samples = list(webdataset.WebDataset(urls, shardshuffle=False))
    gc.collect()
    assert [s["__key__"] for s in samples] == [f"{i:08d}" for i in range(len(samples))]
    stream = np.concatenate([np.frombuffer(s["tok.u2"], "<u2")[:-1] for s in samples])
    ends = np.concatenate([np.frombuffer(s["end.u4"], "<u4").astype(int) + 64 * i for i, s in enumerate(samples)])
    real = int(ends[-1])
    expected = Counter()
    for start in range(0, len(stream), 16):
        tokens = stream[start : min(start + 16, real)]
        expected[tuple(tokens.tolist())] += 1
    config = run_config(
        root / "tokenizer.json", {"a": root / "a"}, batch__micro_batch_size=1, batch__global_batch_size=4
    )
    got = Counter()
    for data in read_run(config, len(stream) // 64):
        for batch in data.batches:
            is_padded = bool((batch.labels[-1:] == -100).all()) and batch.decoder_ids[-1] == 1
            num_real = 16 - batch.decoder_info.lengths[-1] if is_padded else 16
            got[tuple(batch.decoder_ids[:num_real].tolist())] += 1
    assert got == expected


def test_a_resume_with_other_data_seed_or_layout_is_refused_by_name(root: Path) -> None:
    with open_loader(two(root), BYTE_LENGTHS, World()) as loader:
        state = loader.next_state(loader.initial_state())
        loader.check(state)
        assert loader.resume(state) is state
    swapped = run_config(root / "tokenizer.json", {"a": (root / "b", 0.7), "b": (root / "b", 0.3)})
    renamed = run_config(root / "tokenizer.json", {"a": (root / "a", 0.7), "c": (root / "b", 0.3)})
    for config, message in (
        (two(root, seed=8), r"seed=8 is not the checkpoint's 7\. .* Set seed=7"),
        (two(root, data__lanes=4), r"data\.lanes=4 is not the checkpoint's 2"),
        (two(root, data__window_blocks=1), r"data\.window_blocks=1 is not"),
        (two(root, batch__sequence_length=32), r"batch\.sequence_length=32 is not"),
        (swapped, r"data\.sources\.a holds other data \(manifest "),
        (renamed, r"data\.sources\.b is gone"),
    ):
        with open_loader(config, BYTE_LENGTHS, World()) as loader:
            with pytest.raises(DataError, match=message):
                loader.check(state)
            with pytest.raises(DataError, match=message):
                loader.resume(state)


def test_another_batch_size_goes_on_with_the_next_row(root: Path) -> None:
    whole = [i for data in read_run(numbered(root), 8) for i in ids_of(data)]
    with open_loader(numbered(root), BYTE_LENGTHS, World()) as loader:
        state = loader.next_state(loader.next_state(loader.initial_state()))
    with open_loader(numbered(root, batch__global_batch_size=4), BYTE_LENGTHS, World()) as loader:
        with pytest.raises(DataError, match=r"batch\.global_batch_size or a weight"):
            loader.check(state)
        state = loader.resume(state)
        ids = [i for data in steps_of(loader, 12, state, first=2) for i in ids_of(data)]
        assert loader.resume(loader.next_state(state)).segments == state.segments
    assert ids == whole[16:]
    assert [s.first_row for s in state.segments] == [0, 16]


def test_other_weights_lose_and_repeat_nothing(root: Path) -> None:
    with open_loader(two(root), BYTE_LENGTHS, World()) as loader:
        first = steps_of(loader, 3)
        state = loader.initial_state().advance(24)
    other = run_config(root / "tokenizer.json", {"a": (root / "a", 0.5), "b": (root / "b", 0.5)})
    with open_loader(other, BYTE_LENGTHS, World()) as loader:
        state = DataState.from_json(json.loads(json.dumps(loader.resume(state).to_json())))
        second = steps_of(loader, 2, state, first=3)
        rows = {k: [] for k in (0, 1)}
        from pretrain.data.segments import order_of

        for segments, begin, count in ((state.segments[:1], 0, 24), (state.segments, 24, 16)):
            for address in order_of(segments, 7).locate_range(begin, count):
                rows[address.source].append(address[1:])
    assert [d.digest for d in first] == [d.digest for d in read_run(two(root), 3)]
    assert all(d.target_tokens > 0 for d in second)
    for addresses in rows.values():
        assert len(set(addresses)) == len(addresses)


def test_skipped_rows_are_never_read_and_all_others_are(root: Path) -> None:
    whole = [i for data in read_run(numbered(root), 4) for i in ids_of(data)]
    with open_loader(numbered(root, batch__global_batch_size=4), BYTE_LENGTHS, World()) as loader:
        state = loader.initial_state().with_skip(8, 15)
        ids = [i for data in steps_of(loader, 6, state) for i in ids_of(data)]
    assert ids == whole[:8] + whole[15:31]


def test_reading_ahead_changes_nothing_that_is_delivered(root: Path) -> None:
    config = two(root, data__prefetch_steps=3)
    direct = [d.digest for d in read_run(config, 5)]
    with open_loader(config, BYTE_LENGTHS, World()) as loader:
        plain = loader._read(0, loader.initial_state())
        for _ in range(3):  # the same step again while later ones are in the making
            assert loader.read(0, loader.initial_state()).digest == plain.digest == direct[0]
        assert [d.digest for d in steps_of(loader, 5)] == direct


def damaged_store(root: Path, name: str, block: int) -> MemoryStore:
    """The source with one id of one block flipped."""
    from pretrain.data.format import ShardIndex, read_manifest

    store = MemoryStore.of(root / name)
    manifest = read_manifest(store)
    shard, row = manifest.locate(block)
    key = manifest.shards[shard].name
    offset = ShardIndex.from_bytes(store.files[key + ".idx"], manifest, shard, key).span(row, 0).offset
    body = bytearray(store.files[key])
    body[offset + 4] ^= 1
    store.files[key] = bytes(body)
    return store


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, MemoryStore]:
    """Stores by the last part of the path, in place of those on disk."""
    stores: dict[str, MemoryStore] = {}
    real = rows_module.open_store
    monkeypatch.setattr(rows_module, "open_store", lambda path: stores.get(Path(path).name) or real(path))
    return stores


def test_a_corrupt_block_ends_the_run_and_is_named(root: Path, opened: dict[str, MemoryStore]) -> None:
    whole = read_run(numbered(root), 4)
    first = next(step for step, data in enumerate(whole) if set(ids_of(data)) & set(range(12, 16)))
    opened["numbered"] = damaged_store(root, "numbered", 3)
    with open_loader(numbered(root), BYTE_LENGTHS, World()) as loader:
        states = [loader.initial_state()]
        for step in range(first):  # what was read ahead and failed must not show yet
            assert loader.read(step, states[-1]).digest == whole[step].digest
            states.append(loader.next_state(states[-1]))
        for _ in range(2):
            with pytest.raises(CorruptBlockError, match=r"block 3 of source n .* data\.on_corrupt=mask"):
                loader.read(first, states[-1])


def test_a_masked_block_gives_no_labels_shifts_nothing_and_replays_equally(
    root: Path, opened: dict[str, MemoryStore]
) -> None:
    whole = read_run(numbered(root), 8)
    opened["numbered"] = damaged_store(root, "numbered", 3)
    config = numbered(root, data__on_corrupt="mask")
    states, runs = [], []
    with open_loader(config, BYTE_LENGTHS, World()) as loader:
        state = loader.initial_state()
        for step in range(8):
            data = loader.read(step, state)
            if data.corrupt:
                assert data.corrupt == ((0, 3),)
                masked = loader.quarantine(state, data.corrupt)
                again = loader.read(step, masked)
                assert (again.digest, again.corrupt) == (data.digest, ())
                state, data = masked, again
            states.append(state)
            runs.append(data)
            state = loader.next_state(state)
    for before, after in zip(whole, runs, strict=True):
        expected = ids_of(before)
        lost = [i for i in expected if i in range(12, 16)]
        assert ids_of(after) == [i for i in expected if i not in lost]
        assert after.masked_rows == len(lost)
        assert after.target_tokens == before.target_tokens - 15 * len(lost)
    assert sum(data.masked_rows for data in runs) == 8  # twice 4 rows in two epochs
    del opened["numbered"]  # the disk is repaired: a replay with the state still gives the same
    with open_loader(config, BYTE_LENGTHS, World()) as loader:
        last = DataState.from_json(json.loads(json.dumps(states[7].to_json())))
        assert loader.read(7, last).digest == runs[7].digest


def test_too_many_corrupt_blocks_end_a_masking_run(root: Path) -> None:
    with open_loader(numbered(root, data__on_corrupt="mask"), BYTE_LENGTHS, World()) as loader:
        state = loader.quarantine(loader.initial_state(), [(0, 3)])
        with pytest.raises(DataError, match=r"2 of 8 blocks of data\.sources\.n are corrupt \(3, 5\)"):
            loader.quarantine(state, [(0, 5)])


class Stuck(MemoryStore):
    """Reads wait until the test lets them go."""

    gate = threading.Event()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.gate.wait(5)
        return super().get_range(key, start, length)


def test_a_read_that_takes_too_long_names_the_file_and_close_ends_the_thread(
    root: Path, opened: dict[str, MemoryStore]
) -> None:
    opened["numbered"] = store = Stuck.of(root / "numbered")
    assert isinstance(store, Stuck)
    config = numbered(root, health__data_timeout_s=0.2)
    with open_loader(config, BYTE_LENGTHS, World()) as loader:
        with pytest.raises(StoreError, match=r"step 0 did not come within health\.data_timeout_s=0\.2\. .*0000\d\.tar"):
            loader.read(0, loader.initial_state())
        store.gate.set()
        assert loader.read(0, loader.initial_state()).step == 0
    assert not [t for t in threading.enumerate() if t.name == "pretrain-data"]
    with pytest.raises(RuntimeError, match="closed"):
        loader.read(1, loader.initial_state())


def test_less_data_than_a_global_batch_is_refused_with_the_numbers(root: Path, tmp_path: Path) -> None:
    write_tokens(tmp_path / "short", [[5, 6, EOS], [7, EOS], [8, EOS]], root / "tokenizer.json")
    config = run_config(root / "tokenizer.json", {"s": tmp_path / "short"})
    with pytest.raises(DataError, match=r"batch\.global_batch_size=8 is more than the 1 rows of 16 tokens .* \(s 1\)"):
        open_loader(config, BYTE_LENGTHS, World())
    with pytest.raises(DataError, match=r"global_batch_size=200 is more than the \d+ rows"):
        open_loader(pairs(root, batch__global_batch_size=200), BYTE_LENGTHS, World())


def test_one_block_and_one_shard_feed_more_ranks_than_there_are_shards(root: Path, tmp_path: Path) -> None:
    write_tokens(tmp_path / "one", [[9] * 63 + [EOS]], root / "tokenizer.json")
    config = run_config(root / "tokenizer.json", {"s": tmp_path / "one"}, batch__global_batch_size=4)
    for rank in range(4):
        (data,) = read_run(config, 1, World(rank, 4, rank, 4))
        assert len(data.batches) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch__sequence_length": 24}, r"sequence_length=24 does not divide the block"),
        ({"data__lanes": 8}, r"data\.lanes=8 does not divide the 4 rows"),
        ({"model__vocabulary_size": 200}, r"model\.vocabulary_size=200 is below the 300 of data\.sources\.a"),
        (PAIR_CHANGES, r"data\.sources\.a is a source of tokens\. objective\.kind=seq2seq reads pairs"),
    ],
)
def test_sources_that_do_not_fit_the_run_are_refused(root: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_loader(two(root, **changes), BYTE_LENGTHS, World())


def test_pairs_packed_for_other_lengths_are_refused(root: Path) -> None:
    with pytest.raises(DataError, match=r"sequence_length=32 does not fit .* Set batch\.sequence_length=16"):
        open_loader(pairs(root, batch__sequence_length=32), BYTE_LENGTHS, World())
    changes = {**PAIR_CHANGES, "batch__source_length": 32}
    with pytest.raises(DataError, match=r"batch\.source_length=32 does not fit .* Set batch\.source_length=24"):
        open_loader(run_config(root / "tokenizer.json", {"p": root / "pairs"}, **changes), BYTE_LENGTHS, World())


def test_another_tokenizer_and_a_path_without_a_source_are_refused(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer.json"
    other.write_bytes(b"{ }")
    with pytest.raises(DataError, match=r"data\.sources\.a was built with tokenizer \w{12}, but tokenizer="):
        open_loader(run_config(other, {"a": root / "a"}), BYTE_LENGTHS, World())
    with pytest.raises(DataError, match=r"tokenizer=.*absent.json cannot be read"):
        open_loader(run_config(tmp_path / "absent.json", {"a": root / "a"}), BYTE_LENGTHS, World())
    with pytest.raises(DataError, match=r"holds no manifest\.json"):
        open_loader(run_config(root / "tokenizer.json", {"a": tmp_path}), BYTE_LENGTHS, World())


def test_the_description_is_a_tree_with_epochs_and_tokens(root: Path) -> None:
    with open_loader(numbered(root), BYTE_LENGTHS, World()) as loader:
        text = loader.describe()
    assert text.splitlines()[0] == "data of test: 80 rows in 10 steps"
    assert "├─ source n: 32 documents, 512 tokens in 8 blocks x 4 rows; 2.50 epochs over the run" in text
    assert "├─ from step 0: n 1 of 1 rows" in text
    assert "└─ step: 8 rows = 4 micro-batches x 2 rows; 128 token slots a step, 1,280 in the run" in text


def test_yaml_order_of_the_sources_does_not_matter(root: Path) -> None:
    tokenizer = root / "tokenizer.json"
    turned = run_config(tokenizer, {"b": (root / "b", 0.3), "a": (root / "a", 0.7)})
    assert [d.digest for d in read_run(turned, 3)] == [d.digest for d in read_run(two(root), 3)]
