from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.data import build as build_module
from pretrain.data.build import BuildProgress, build, local_pool, num_workers
from pretrain.data.format import decode_provenance
from pretrain.data.task_pool import WorkerProcesses
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import DataError, PretrainError, StoreError
from tests.data_build.corpus import (
    documents_in,
    file_hashes,
    manifest_of,
    numbered_texts,
    pair_options,
    pairs_in,
    text_options,
    webdataset_blocks,
    write_jsonl,
)


@pytest.fixture
def corpus(texts: Path) -> Path:
    return write_jsonl(texts / "corpus.jsonl", [{"text": text} for text in numbered_texts(200)])


def _pairs(count: int) -> list[dict[str, Any]]:
    english, german = numbered_texts(count, seed=1), numbered_texts(count, seed=2)
    short = [" ".join(text.split()[:6]) for text in english], [" ".join(text.split()[:9]) for text in german]
    return [{"en": source, "de": target} for source, target in zip(*short, strict=True)]


def test_the_bytes_are_the_same_for_any_number_of_workers_ranges_and_parts(
    tmp_path: Path, corpus: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = write_jsonl(tmp_path / "pairs.jsonl", _pairs(100))
    hashes = []
    for workers, memory_bytes in [(1, None), (2, None), (3, 2**20)]:
        monkeypatch.setattr("pretrain.data.build._LEAST_RANGE_BYTES", 1000 * workers)
        monkeypatch.setattr("pretrain.data.stage_encode._PART_TOKENS", 700 // workers)
        out = tmp_path / str(workers)
        changes = {"workers": workers, "validation_fraction": 0.1, "name": "same", "memory_bytes": memory_bytes}
        build(text_options(corpus, out / "text", tokenizer_path, **changes))
        if workers < 3:
            build(pair_options(pairs, out / "pairs", tokenizer_path, **changes))
        hashes.append(file_hashes(out))
    assert hashes[0] == hashes[1]
    assert hashes[2].items() <= hashes[0].items()
    assert len(hashes[2]) >= 6


def test_every_document_is_there_once_as_the_stock_webdataset_library_reads_it(
    tmp_path: Path, corpus: Path, tokenizer_path: str, tokenizer: Tokenizer
) -> None:
    report = build(text_options(corpus, tmp_path / "out", tokenizer_path))
    path, manifest = report.sources["train"]
    expected = [ids.tolist() for ids in tokenizer.encode_batch(numbered_texts(200))]
    found = documents_in(path, tokenizer.eos_id)
    assert sorted(found) == sorted(expected)
    assert found != expected, "documents are shuffled"
    assert manifest.documents == report.documents_read == 200
    assert manifest.tokens == sum(map(len, expected)) + 200
    assert manifest.text_bytes == sum(len(text.encode()) for text in numbered_texts(200)) == report.read_bytes
    assert manifest == manifest_of(path)
    assert manifest.tokenizer_sha256 == hashlib.sha256(Path(tokenizer_path).read_bytes()).hexdigest()
    body = report.to_json()["sources"]["train"]
    assert body["bytes_per_token"] == pytest.approx(manifest.text_bytes / (sum(map(len, expected)) + 200))
    counted = Counter(str(math.floor(4 * math.log2(len(ids) + 1))) for ids in expected)  # four bins a doubling
    assert report.lengths == {"tokens": counted}
    assert len(manifest.shards) == -(-manifest.blocks // 16) > 1


def test_a_block_ends_with_the_first_token_of_the_next_and_names_its_documents(
    tmp_path: Path, corpus: Path, tokenizer_path: str, tokenizer: Tokenizer
) -> None:
    build(text_options(corpus, tmp_path / "out", tokenizer_path))
    texts = numbered_texts(200)
    blocks = webdataset_blocks(tmp_path / "out")
    followers = [block["tok"][0] for block in blocks[1:]] + [tokenizer.eos_id]
    assert [block["tok"][-1] for block in blocks] == followers
    for number, block in enumerate(blocks):
        assert block["key"] == f"{number:08d}"
        documents, continued = decode_provenance(json.dumps(block["json"]).encode())
        starts = [0, *block["end"]]
        for place, (document, start) in enumerate(zip(documents, starts, strict=False)):
            assert document.origin == str(corpus)
            text = texts[document.line - 1]
            piece = tokenizer.decode(block["tok"][start : (block["end"] + [64])[place]])
            whole = not (continued and place == 0)
            assert text.encode().startswith(piece.split("\ufffd")[0].encode()) or not whole


def test_pairs_come_back_side_by_side_in_rows_that_are_never_cut(
    tmp_path: Path, tokenizer_path: str, tokenizer: Tokenizer
) -> None:
    records = _pairs(120)
    build(pair_options(write_jsonl(tmp_path / "p.jsonl", records), tmp_path / "out", tokenizer_path))
    expected = []
    for record in records:
        source, target = tokenizer.encode_batch([record["en"], record["de"]])
        expected.append(([*source.tolist(), tokenizer.eos_id], [*target.tolist(), tokenizer.eos_id]))
    rows = pairs_in(tmp_path / "out")
    assert sorted(pair for row in rows for pair in row) == sorted(expected)
    manifest = manifest_of(tmp_path / "out")
    assert manifest.tokens == sum(len(target) for _, target in expected)
    assert manifest.source_tokens == sum(len(source) for source, _ in expected)
    assert max(len(row) for row in rows) > 1


def test_provenance_of_pairs_follows_the_rows(tmp_path: Path, tokenizer_path: str, tokenizer: Tokenizer) -> None:
    records = _pairs(40)
    build(pair_options(write_jsonl(tmp_path / "p.jsonl", records), tmp_path / "out", tokenizer_path))
    pairs = [pair for row in pairs_in(tmp_path / "out") for pair in row]
    lines = [
        item.line
        for block in webdataset_blocks(tmp_path / "out")
        for item in decode_provenance(json.dumps(block["json"]).encode())[0]
    ]
    assert [tokenizer.decode(target) for _, target in pairs] == [records[line - 1]["de"] for line in lines]


def test_pairs_longer_than_a_row_are_an_error_or_left_out_and_counted(tmp_path: Path, tokenizer_path: str) -> None:
    records = [*_pairs(30), {"en": "x" * 200, "de": "short"}, {"en": "short", "de": "y" * 200}]
    path = write_jsonl(tmp_path / "p.jsonl", records)
    with pytest.raises(DataError, match=r"2 pairs fit no row \(the longest sides: \d+ and \d+ tokens\).*--over-long"):
        build(pair_options(path, tmp_path / "out", tokenizer_path))
    report = build(pair_options(path, tmp_path / "out", tokenizer_path, over_long="drop"))
    assert report.reused_tasks == 1, "what was tokenised before the refusal is kept"
    manifest = report.sources["train"][1]
    assert (report.too_long, manifest.dropped, manifest.documents) == (2, 2, 30)
    with pytest.raises(DataError, match=r"32 pairs fit no row.*--source-length"):
        build(pair_options(path, tmp_path / "none", tokenizer_path, source_length=3, over_long="drop"))


def test_a_document_longer_than_many_blocks_loses_no_token(
    tmp_path: Path, texts: Path, tokenizer_path: str, tokenizer: Tokenizer
) -> None:
    long = " ".join(numbered_texts(60, seed=5))
    (texts / "long.txt").write_text(long)
    report = build(text_options(texts, tmp_path / "out", tokenizer_path))
    (ids,) = tokenizer.encode_batch([long])
    assert documents_in(tmp_path / "out", tokenizer.eos_id) == [ids.tolist()]
    assert report.sources["train"][1].blocks > 5


def test_duplicates_are_dropped_and_counted_or_kept(tmp_path: Path, texts: Path, tokenizer_path: str) -> None:
    distinct = numbered_texts(30)
    path = write_jsonl(texts / "a.jsonl", [{"text": text} for text in distinct + distinct[:10] + distinct[:10]])
    dropped = build(text_options(path, tmp_path / "dropped", tokenizer_path))
    assert (dropped.duplicates, dropped.sources["train"][1].documents) == (20, 30)
    kept = build(text_options(path, tmp_path / "kept", tokenizer_path, deduplicate=False))
    assert (kept.duplicates, kept.sources["train"][1].documents) == (0, 50)
    found = documents_in(tmp_path / "kept", 0)
    neighbours = sum(first == second for first, second in pairwise(found))
    assert neighbours <= 4, "equal documents are shuffled apart"


def test_another_seed_gives_another_order_of_the_same_documents(
    tmp_path: Path, corpus: Path, tokenizer_path: str
) -> None:
    for seed in (0, 1):
        build(text_options(corpus, tmp_path / str(seed), tokenizer_path, seed=seed))
    first, second = (documents_in(tmp_path / name, 0) for name in ("0", "1"))
    assert first != second
    assert sorted(first) == sorted(second)


def test_the_order_of_inputs_and_names_of_files_change_no_token(
    tmp_path: Path, texts: Path, tokenizer_path: str
) -> None:
    for number, text in enumerate(numbered_texts(20)):
        (texts / f"{number:02d}.txt").write_text(text)
    build(text_options(texts, tmp_path / "a", tokenizer_path))
    for number in range(20):
        (texts / f"{number:02d}.txt").rename(texts / f"x{97 - number}.txt")
    build(text_options(texts, tmp_path / "b", tokenizer_path))
    assert documents_in(tmp_path / "a", 0) == documents_in(tmp_path / "b", 0)


def test_validation_is_held_out_by_content_whatever_the_seed_and_the_rest(
    tmp_path: Path, texts: Path, tokenizer_path: str
) -> None:
    held_out = []
    for number, count in enumerate((200, 150)):
        path = write_jsonl(texts / f"{count}.jsonl", [{"text": text} for text in numbered_texts(count)])
        out = tmp_path / str(count)
        build(text_options(path, out, tokenizer_path, validation_fraction=0.2, seed=number))
        train, validation = (documents_in(out / name, 0) for name in ("train", "validation"))
        assert len(train) + len(validation) == count
        assert not {*map(tuple, train)} & {*map(tuple, validation)}
        held_out.append({*map(tuple, validation)})
    assert 20 < len(held_out[0]) < 60
    assert held_out[1] < held_out[0]


def test_pairs_with_the_same_source_are_on_one_side_of_the_split(tmp_path: Path, tokenizer_path: str) -> None:
    records = [{"en": f"word {number // 4}", "de": f"wort {number}"} for number in range(200)]
    out = tmp_path / "out"
    build(pair_options(write_jsonl(tmp_path / "p.jsonl", records), out, tokenizer_path, validation_fraction=0.2))
    sources = [
        {tuple(source) for row in pairs_in(out / split) for source, _ in row} for split in ("train", "validation")
    ]
    assert all(sources)
    assert not sources[0] & sources[1]


def test_max_bytes_keeps_a_subset_that_fits_and_grows_with_the_budget(
    tmp_path: Path, corpus: Path, tokenizer_path: str
) -> None:
    kept = []
    for budget in (2000, 4000):
        report = build(text_options(corpus, tmp_path / str(budget), tokenizer_path, max_bytes=budget))
        manifest = report.sources["train"][1]
        assert budget - 300 < manifest.text_bytes <= budget
        assert manifest.documents + report.not_selected == 200
        kept.append({*map(tuple, documents_in(tmp_path / str(budget), 0))})
    assert kept[0] < kept[1]


def test_ids_above_65535_are_stored_whole(tmp_path: Path, texts: Path, tokenizer_path: str) -> None:
    body = json.loads(Path(tokenizer_path).read_bytes())
    vocabulary = {token: index for token, index in body["model"]["vocab"].items() if len(token) == 1}
    vocabulary |= {token: index for index, token in enumerate(("<|endoftext|>", "<|pad|>", "<|start|>"))}
    vocabulary |= {f"unused{index}": index for index in range(259, 70_000)}
    del vocabulary["unused65541"]
    vocabulary["qq"] = 65_541
    body["model"] |= {"vocab": vocabulary, "merges": [["q", "q"]]}
    (tmp_path / "big.json").write_text(json.dumps(body))
    (texts / "a.txt").write_text("aqqa")
    manifest = build(text_options(texts, tmp_path / "out", str(tmp_path / "big.json"))).sources["train"][1]
    assert (manifest.dtype, manifest.vocabulary_size) == ("u4", 70_000)
    a = vocabulary["a"]
    assert documents_in(tmp_path / "out", 0) == [[a, 65_541, a]]


def test_a_document_that_spells_the_end_token_is_one_document(tmp_path: Path, texts: Path, tokenizer_path: str) -> None:
    (texts / "a.txt").write_text("a<|endoftext|>b<|pad|>")
    manifest = build(text_options(texts, tmp_path / "out", tokenizer_path)).sources["train"][1]
    assert manifest.documents == len(documents_in(tmp_path / "out", 0)) == 1


@pytest.mark.parametrize("content", [None, "", " \n\n"])
def test_an_empty_corpus_is_refused_and_leaves_nothing(
    tmp_path: Path, texts: Path, tokenizer_path: str, content: str | None
) -> None:
    if content is not None:
        (texts / "a.txt").write_text(content)
    with pytest.raises(DataError, match="holds no fitting file" if content is None else "the corpus is empty"):
        build(text_options(texts, tmp_path / "out", tokenizer_path))
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_a_split_without_a_document_is_refused(tmp_path: Path, texts: Path, tokenizer_path: str) -> None:
    (texts / "a.txt").write_text("only one")
    with pytest.raises(DataError, match=r"validation_fraction=0.5 leaves no document for (train|validation)"):
        build(text_options(texts, tmp_path / "out", tokenizer_path, validation_fraction=0.5))
    assert not list(tmp_path.glob("out*"))


def test_an_existing_output_is_refused_untouched(tmp_path: Path, corpus: Path, tokenizer_path: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(DataError, match=r"out=.*/out exists.*Choose another --out"):
        build(text_options(corpus, tmp_path / "out", tokenizer_path))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_all_wrong_options_are_named_at_once(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(DataError) as caught:
        text_options(corpus, tmp_path, "t", block_tokens=1, validation_fraction=1.0, max_bytes=0, seed=-1, workers=0)
    for name in ("block_tokens=1", "validation_fraction=1", "max_bytes=0", "seed=-1", "workers=0"):
        assert name in str(caught.value)
    with pytest.raises(DataError, match=r"source_length=0 .*--source-length"):
        pair_options(corpus, tmp_path, "t", source_length=0)
    with pytest.raises(DataError, match="are for pairs"):
        text_options(corpus, tmp_path, "t", source_length=8)


def test_a_second_build_of_the_same_output_is_refused_and_a_dead_ones_rest_removed(
    tmp_path: Path, corpus: Path, tokenizer_path: str
) -> None:
    out = tmp_path / "out"
    (tmp_path / "out.partial" / "work").mkdir(parents=True)
    (tmp_path / "out.partial" / "lock").touch()
    (tmp_path / "out.partial" / "work" / "00000.run").write_bytes(b"rest of a build that died")
    messages = []

    def build_again(progress: BuildProgress) -> None:
        if not messages:
            with pytest.raises(DataError, match="is being written by another build") as caught:
                build(text_options(corpus, out, tokenizer_path))
            messages.append(str(caught.value))

    build_module.build(text_options(corpus, out, tokenizer_path), build_again)
    assert messages
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts"]
    assert not (out / "lock").exists()
    assert len(documents_in(out, 0)) == 200


def test_progress_reports_both_phases_and_ends_complete(tmp_path: Path, corpus: Path, tokenizer_path: str) -> None:
    seen: list[BuildProgress] = []
    report = build(text_options(corpus, tmp_path / "out", tokenizer_path), seen.append)
    assert {item.phase for item in seen} == {"read", "encode", "write"}
    for phase in ("read", "encode", "write"):
        last = [item for item in seen if item.phase == phase][-1]
        assert last.done_bytes == report.read_bytes
        assert phase == "read" or last.total_bytes == report.read_bytes
    assert seen[-1].done_tokens == report.sources["train"][1].tokens


def test_a_large_build_takes_every_processor_and_a_small_one_none_beside_its_own(tmp_path: Path) -> None:
    options = text_options(tmp_path, tmp_path / "out", "t", workers=None)
    assert num_workers(options, 10**9) == len(os.sched_getaffinity(0))
    assert num_workers(options, 10**5) == num_workers(replace(options, max_bytes=10**5), 10**9) == 1
    assert num_workers(replace(options, workers=3), 10) == 3
    with local_pool(replace(options, workers=3), 10, None) as pool:
        assert isinstance(pool, WorkerProcesses)
        assert len(pool._workers) == 3


def test_progress_knows_that_max_bytes_ends_the_encoding(
    tmp_path: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pretrain.data.build_plan._PIECE_BYTES", 1)  # a piece per file
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(4):
        write_jsonl(texts / f"{number}.jsonl", [{"text": text} for text in numbered_texts(50, seed=number)])
    seen: list[BuildProgress] = []
    build(text_options(texts, tmp_path / "out", tokenizer_path, max_bytes=1000), seen.append)
    encoding = [item for item in seen if item.phase == "encode"]
    assert encoding[0].total_bytes == 1000  # and not the thousand that every file keeps for itself
    assert encoding[-1].total_bytes == encoding[-1].done_bytes
    assert 500 < encoding[-1].done_bytes <= 1000


_BUILD = """
import sys
from pretrain.data.build import BuildOptions, build
from pretrain.data.sources import SourceSpec
from pretrain.errors import PretrainError
{before}
try:
    build(BuildOptions(SourceSpec((sys.argv[1],)), sys.argv[2], sys.argv[3], workers=2, block_tokens=64))
except PretrainError as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""


def _build_in_process(before: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _BUILD.format(before=before), *words], stdout=subprocess.PIPE, text=True
    )


def test_a_full_disk_is_named_and_the_build_goes_on_later(tmp_path: Path, corpus: Path, tokenizer_path: str) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))"
    process = _build_in_process(limit, str(corpus), str(tmp_path / "out"), tokenizer_path)
    output, _ = process.communicate(timeout=60)
    assert output.startswith("StoreError: cannot write ")
    assert "ulimit -f" in output
    assert not (tmp_path / "out").exists()
    build(text_options(corpus, tmp_path / "out", tokenizer_path))
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]


def test_a_worker_that_dies_ends_the_build_with_its_code(
    tmp_path: Path, corpus: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "killer").mkdir()
    (tmp_path / "killer" / "sitecustomize.py").write_text(
        "import os, sys\nif sys.orig_argv[1:] == ['-m', 'pretrain.data.tasks']: os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "killer"))
    started = time.monotonic()
    with pytest.raises(PretrainError, match=r"a build worker ended with code -9.*fewer --workers"):
        build(text_options(corpus, tmp_path / "out", tokenizer_path, workers=2))
    assert time.monotonic() - started < 20
    assert not (tmp_path / "out").exists()


def test_a_directory_that_cannot_be_made_is_a_store_error(tmp_path: Path, corpus: Path, tokenizer_path: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="cannot make"):
        build(text_options(corpus, tmp_path / "file" / "out", tokenizer_path))


def test_writer_refuses_an_id_outside_the_vocabulary(tmp_path: Path, corpus: Path, tokenizer_path: str) -> None:
    from pretrain.data.shard_writer import BlockCounts, SourceWriter

    manifest = build(text_options(corpus, tmp_path / "out", tokenizer_path)).sources["train"][1]
    with SourceWriter(tmp_path / "bad", manifest, shard_blocks=1) as writer:
        for wrong in (300, -1):
            ids = np.full(65, 5, dtype=np.int64)
            ids[7] = wrong
            with pytest.raises(DataError, match=rf"token id {wrong} is outside the vocabulary.*0..299"):
                writer.add([ids, np.array([3])], b"{}", BlockCounts(1, 64, 0, 9))
    assert not (tmp_path / "bad" / "manifest.json").exists()


def test_the_bytes_of_a_shard_never_change(
    tmp_path: Path, texts: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Golden: tar layout, index and order, so that no refactoring changes data silently."""
    monkeypatch.chdir(tmp_path)
    (texts / "t.jsonl").write_text(
        "".join(json.dumps({"text": f"{number}" * number}) + "\n" for number in range(1, 40))
    )
    body = json.loads(Path(tokenizer_path).read_bytes())
    letters = {token: index for token, index in body["model"]["vocab"].items() if index < 259}
    body["model"] |= {"vocab": letters, "merges": []}  # bytes only: independent of how BPE is trained
    (tmp_path / "bytes.json").write_text(json.dumps(body))
    build(text_options(Path("texts"), Path("out"), "bytes.json", shard_blocks=100))
    hashes = file_hashes(tmp_path / "out")
    assert hashes["00000.tar"] == "a67a20ee95215f9522a39b5118f6a1e40af888b033eac3177d7b0e479522fd9a"
    assert hashes["00000.tar.idx"] == "de01a3f9b6e86a1e40834ad9f46fd0987d2712c4b759eb6c2774a5e2a9494e6f"
