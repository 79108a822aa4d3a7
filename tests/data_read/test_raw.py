"""Raw text: rows from tars against a plain loop over tarfile and the tokenizers library, for any stop and any ranks."""

from __future__ import annotations

import io
import json
import random
import tarfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from pretrain.config import config_from_dict
from pretrain.data.batch import sum_digests
from pretrain.data.loader import open_loader
from pretrain.data.raw_loader import RawLoader
from pretrain.data.rows import open_sources
from pretrain.data.state import DataState
from pretrain.data.tokenizer import Tokenizer, train_bpe
from pretrain.errors import ConfigError, DataError, StoreError
from pretrain.topology import World
from tests.data_read.corpus import run_config

LANES, LENGTH, STEPS = 2, 16, 12


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rng = tmp_path_factory.mktemp("raw"), random.Random(3)
    words = "one two three four five größe 日本 six".split()
    texts = [f"{n} " + " ".join(rng.choices(words, k=rng.randint(1, 30))) for n in range(70)]
    train_bpe([*texts, *(text.upper() for text in texts)], 300).save(root / "tokenizer.json")
    for name, count, shards in (("a", 50, 5), ("b", 20, 2)):
        (root / name).mkdir()
        mine = [texts.pop() if name == "a" else texts.pop().upper() for _ in range(count)]
        for shard in range(shards):
            members: list[tuple[str, bytes]] = []
            for number, text in enumerate(mine[shard::shards]):
                if number % 3:
                    members.append((f"d{number}.v1.txt", text.encode()))
                else:
                    members.append((f"d{number}.json", json.dumps({"text": text}).encode()))
            members.insert(2, ("empty.txt", b"  "))
            write_tar(root / name / f"{shard:03d}.tar", members)
    return root


def raw_config(root: Path, **changes: Any) -> Any:
    sources = {"a": (root / "a", 0.75), "b": (str(root / "b") + "/{000..001}.tar", 0.25)}
    changes = {"data__reading": "raw", "data__lanes": LANES, **changes}
    return run_config(root / "tokenizer.json", sources, **changes)


def documents_by_hand(root: Path) -> dict[str, Counter[tuple[int, ...]]]:
    """Ids with eos of each document, by source."""
    encoder, eos = tokenizers.Tokenizer.from_file(str(root / "tokenizer.json")), Tokenizer.load(root / "tokenizer.json")
    found: dict[str, Counter[tuple[int, ...]]] = {"a": Counter(), "b": Counter()}
    for name, counter in found.items():
        for path in sorted((root / name).glob("*.tar")):
            with tarfile.open(path) as archive:
                for member in archive:
                    data = archive.extractfile(member).read()  # type: ignore[union-attr]
                    text = json.loads(data)["text"] if member.name.endswith(".json") else data.decode()
                    if text.strip():
                        counter[(*encoder.encode(text, add_special_tokens=False).ids, eos.eos_id)] += 1
    return found


def read(config: Any, root: Path, world: World, first: int, count: int, saved: str | None = None) -> tuple[Any, str]:
    lengths = Tokenizer.load(root / "tokenizer.json").byte_lengths()
    with open_loader(config, lengths, world) as loader:
        state = loader.initial_state() if saved is None else loader.resume(DataState.from_json(json.loads(saved)))
        found = []
        for step in range(first, first + count):
            found.append(loader.read(step, state))
            state = loader.next_state(state)
    return found, json.dumps(state.to_json())


def test_each_lane_reads_its_documents_whole_and_once_an_epoch(root: Path) -> None:
    """Rows of one source put behind each other by lane, cut at end tokens: each document once before any twice."""
    config = run_config(
        root / "tokenizer.json", {"a": root / "a"}, data__reading="raw", data__lanes=LANES,
        batch__micro_batch_size=1, batch__global_batch_size=4,
    )  # fmt: skip
    data, _ = read(config, root, World(), 0, 60)
    eos = Tokenizer.load(root / "tokenizer.json").eos_id
    wanted = documents_by_hand(root)["a"]
    epochs = []
    seen: Counter[tuple[int, ...]] = Counter()
    for lane in range(LANES):
        stream = [int(i) for step in data for b in step.batches if b.index % LANES == lane for i in b.decoder_ids]
        documents: list[tuple[int, ...]] = []
        begin = 0
        for at, token in enumerate(stream):
            if token == eos:
                documents.append(tuple(stream[begin : at + 1]))
                begin = at + 1
        distinct = len(set(documents))
        assert set(documents[:distinct]) == set(documents)  # an epoch of the lane, then another order of the same
        assert len(documents) > distinct
        epochs.append(set(documents))
        seen += Counter(documents[:distinct])
        for step in data:  # every token but a document's first is a target
            for batch in step.batches:
                assert batch.target_tokens == LENGTH - int((batch.decoder_ids == eos).sum())
    assert not epochs[0] & epochs[1]
    assert seen == wanted


def test_any_ranks_and_any_stop_read_the_same(root: Path) -> None:
    config = raw_config(root)
    whole, _ = read(config, root, World(), 0, STEPS)
    for ranks in (2, 5):
        parts = [read(config, root, World(rank, ranks, rank, ranks), 0, STEPS)[0] for rank in range(ranks)]
        for step, data in enumerate(whole):
            assert sum_digests(part[step].digest for part in parts) == data.digest
            assert {len(part[step].batches) for part in parts} == {-(-4 // ranks)}
    saved = None
    digests = []
    for first, count in ((0, 1), (1, 4), (5, 5), (10, 2)):
        found, saved = read(config, root, World(), first, count, saved)
        digests += [data.digest for data in found]
    assert digests == [data.digest for data in whole]
    assert len(set(digests)) == STEPS
    assert len(saved or "") < 2000


def test_sources_are_mixed_by_their_weights(root: Path) -> None:
    data, _ = read(raw_config(root), root, World(), 0, STEPS)
    tokenizer = Tokenizer.load(root / "tokenizer.json")
    rows = [
        tokenizer.decode(batch.decoder_ids[n * LENGTH : (n + 1) * LENGTH].tolist())
        for step in data
        for batch in step.batches
        for n in range(2)
    ]
    upper = [text == text.upper() for text in rows]  # as only b's text is
    assert [text == text.lower() for text in rows] == [not is_upper for is_upper in upper]
    assert sum(upper) == len(rows) // 4 == 24


@pytest.mark.parametrize("objective", ["prefix_lm", "causal_lm"])
def test_objectives_replay_in_raw_mode(root: Path, objective: str) -> None:
    config = raw_config(root, objective__kind=objective)
    whole, _ = read(config, root, World(), 0, 4)
    _, saved = read(config, root, World(), 0, 2)
    rest, _ = read(config, root, World(), 2, 2, saved)
    assert [data.digest for data in rest] == [data.digest for data in whole[2:]]


def test_what_does_not_fit_raw_reading_is_refused_by_name(root: Path) -> None:
    body = raw_config(root).model_dump(mode="json")
    for path, value, field in (
        ("data.stages", [{"from_step": 1, "weights": {"a": 1}}], r"data\.stages"),
        ("data.skip_rows", [[0, 8]], r"data\.skip_rows"),
        ("data.on_corrupt", "mask", r"data\.on_corrupt=mask"),
        ("data.cache", "/tmp/x", r"data\.cache"),
        ("health.spike_z_score", 8, r"health\.spike_z_score"),
    ):
        changed = json.loads(json.dumps(body))
        section, name = path.split(".")
        changed[section][name] = value
        with pytest.raises(ConfigError, match=f"{field} does not fit data.reading=raw"):
            config_from_dict(changed)
    body["data"]["sources"]["b"]["max_epochs"] = 2
    with pytest.raises(ConfigError, match=r"data\.sources\.b\.max_epochs does not fit data\.reading=raw"):
        config_from_dict(body)
    lengths = Tokenizer.load(root / "tokenizer.json").byte_lengths()
    with pytest.raises(DataError, match=r"b has 2 tar files for data\.lanes=4\. .* Set data\.lanes=2 or less"):
        open_loader(raw_config(root, data__lanes=4), lengths, World())
    with pytest.raises(DataError, match=r"data\.reading=raw has no rows that can be told before they are read"):
        open_sources(raw_config(root), "sources")


def test_a_resume_with_other_lanes_batch_or_tars_is_refused(root: Path, tmp_path: Path) -> None:
    _, saved = read(raw_config(root), root, World(), 0, 2)
    for changes, message in (
        ({"data__lanes": 1}, r"data\.lanes=1 is not the checkpoint's 2\. With data\.reading=raw a run goes on only as"),
        ({"batch__global_batch_size": 4}, r"batch\.global_batch_size=4 is not the checkpoint's 8"),
        ({"seed": 8}, r"seed=8 is not the checkpoint's 7"),
    ):
        with pytest.raises(DataError, match=message):
            read(raw_config(root, **changes), root, World(), 2, 1, saved)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for path in (root / name).glob("*.tar"):
            (tmp_path / name / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer.json").write_bytes((root / "tokenizer.json").read_bytes())
    message = r"the tar files under data\.sources .* or the tokenizer are not the checkpoint's"
    with pytest.raises(DataError, match=message):
        read(raw_config(tmp_path), tmp_path, World(), 2, 1, saved)
    train_bpe(["other words make other tokens"], 265).save(tmp_path / "tokenizer.json")
    other = raw_config(root).model_copy(update={"tokenizer": str(tmp_path / "tokenizer.json")})
    with pytest.raises(DataError, match=message):
        read(other, tmp_path, World(), 2, 1, saved)


def test_who_waits_for_raw_rows_says_so_and_gives_up_by_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, signs, read = threading.Event(), list[int](), RawLoader._read
    lengths = Tokenizer.load(root / "tokenizer.json").byte_lengths()

    def slow(self: RawLoader, step: int, state: DataState) -> Any:
        gate.wait(20)
        return read(self, step, state)

    def waiting() -> None:
        signs.append(1)
        if len(signs) == 2:
            gate.set()

    with open_loader(raw_config(root), lengths, World()) as patient:
        expected = patient.read(0, patient.initial_state()).digest
    monkeypatch.setattr(RawLoader, "_read", slow)
    with open_loader(raw_config(root), lengths, World()) as waited:
        assert waited.read(0, waited.initial_state(), waiting).digest == expected
        assert len(signs) >= 2
    gate.clear()
    with open_loader(raw_config(root, health__data_timeout_s=0.2), lengths, World()) as hasty:
        with pytest.raises(StoreError, match=r"step 0 did not come within health\.data_timeout_s=0\.2"):
            hasty.read(0, hasty.initial_state())
        gate.set()


def test_a_damaged_tar_ends_the_read_by_name(root: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((root / "tokenizer.json").read_bytes())
    for name in ("000", "001"):
        data = (root / "b" / f"{name}.tar").read_bytes()
        (tmp_path / f"{name}.tar").write_bytes(data[: len(data) // 2])
    config = run_config(tmp_path / "tokenizer.json", {"b": tmp_path}, data__reading="raw", data__lanes=1)
    with pytest.raises(DataError, match=r"00\d\.tar is damaged"):
        read(config, tmp_path, World(), 0, 30)
