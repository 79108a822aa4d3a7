"""Rows of whole documents, and a repacked source that is byte for byte a freshly built one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.cli import main
from pretrain.data.batch import BatchShape
from pretrain.data.blocks import BlockReader
from pretrain.data.build import build
from pretrain.data.format import Manifest
from pretrain.data.repack import RepackOptions, repack
from pretrain.data.rows import SourceRows
from pretrain.data.tokenizer import Tokenizer
from pretrain.data.verify import verify_source
from pretrain.errors import DataError
from pretrain.sequence import IGNORED_LABEL
from pretrain.store import open_store
from tests.data_build.corpus import (
    file_hashes,
    manifest_of,
    numbered_texts,
    pair_options,
    text_options,
    webdataset_blocks,
    write_jsonl,
)

TEXTS = numbered_texts(90)


@pytest.fixture
def corpus(texts: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in ("stage_pack", "layout", "stage_unpack"):
        monkeypatch.setattr(f"pretrain.data.{module}.WINDOW_DOCUMENTS", 32)
    monkeypatch.setattr("pretrain.data.stage_unpack._PART_TOKENS", 500)
    records = [{"text": text, "en": text[:40], "de": text[:50], "id": f"n{n}", "at": n} for n, text in enumerate(TEXTS)]
    return write_jsonl(texts / "c.jsonl", records)


def _rows(directory: Path) -> list[list[list[int]]]:
    """The documents of each row, cut by the ends alone."""
    manifest = manifest_of(directory)
    rows = []
    for block in webdataset_blocks(directory):
        for row in range(manifest.block_tokens // manifest.row_tokens):
            low, high = row * manifest.row_tokens, (row + 1) * manifest.row_tokens
            start, documents = low, []
            for end in block["tok.end" if "tok.end" in block else "end"]:
                if low < end <= high:
                    documents.append(block["tok"][start:end])
                    start = end
            assert set(block["tok"][start:high]) <= {manifest.pad_id}
            rows.append(documents)
    return rows


def _built(corpus: Path, out: Path, tokenizer_path: str, **changes: Any) -> Manifest:
    manifest = build(text_options(corpus, out, tokenizer_path, name="same", **changes)).sources["train"][1]
    assert verify_source(open_store(out)).problems == ()
    return manifest


def test_rows_hold_whole_documents_each_once(
    tmp_path: Path, corpus: Path, tokenizer_path: str, tokenizer: Tokenizer
) -> None:
    expected = [[*ids.tolist(), tokenizer.eos_id] for ids in tokenizer.encode_batch(TEXTS)]
    fitting = [ids for ids in expected if len(ids) <= 96]
    assert 0 < len(fitting) < len(expected)
    manifest = _built(corpus, tmp_path / "drop", tokenizer_path, row_tokens=96, block_tokens=192, over_long="drop")
    assert sorted(document for row in _rows(tmp_path / "drop") for document in row) == sorted(fitting)
    assert (manifest.documents, manifest.dropped) == (len(fitting), len(expected) - len(fitting))
    assert manifest.fill_fraction == pytest.approx(sum(map(len, fitting)) / (manifest.blocks * 192), abs=1e-6)

    manifest = _built(corpus, tmp_path / "cut", tokenizer_path, row_tokens=96, block_tokens=192, over_long="cut")
    cut = [ids if len(ids) <= 96 else [*ids[:95], tokenizer.eos_id] for ids in expected]
    assert sorted(document for row in _rows(tmp_path / "cut") for document in row) == sorted(cut)
    assert (manifest.documents, manifest.shortened) == (len(expected), len(expected) - len(fitting))

    manifest = _built(corpus, tmp_path / "split", tokenizer_path, row_tokens=96, block_tokens=192, over_long="split")
    pieces = [ids[start : start + 96] for ids in expected for start in range(0, len(ids), 96)]
    assert sorted(document for row in _rows(tmp_path / "split") for document in row) == sorted(pieces)
    assert (manifest.documents, manifest.tokens) == (len(expected), sum(map(len, expected)))

    with pytest.raises(
        DataError, match=rf"row_tokens=96: {len(expected) - len(fitting)} documents fit no row.*--over-long"
    ):
        build(text_options(corpus, tmp_path / "fail", tokenizer_path, row_tokens=96, block_tokens=192))


def test_a_repacked_source_is_the_one_that_a_build_gives(tmp_path: Path, corpus: Path, tokenizer_path: str) -> None:
    layouts: dict[str, dict[str, Any]] = {
        "cut small": {"block_tokens": 64, "row_tokens": 0, "over_long": "fail", "shard_blocks": 16},
        "cut large": {"block_tokens": 128, "row_tokens": 0, "over_long": "fail", "shard_blocks": 5},
        "rows split": {"block_tokens": 128, "row_tokens": 32, "over_long": "split", "shard_blocks": 3},
        "rows dropped": {"block_tokens": 128, "row_tokens": 64, "over_long": "drop", "shard_blocks": 4},
        "rows fewer": {"block_tokens": 64, "row_tokens": 32, "over_long": "drop", "shard_blocks": 4},
    }
    for name, layout in layouts.items():
        _built(corpus, tmp_path / name, tokenizer_path, **layout)
    for start, end in [
        ("cut small", "cut large"),
        ("cut large", "rows split"),
        ("rows split", "cut small"),
        ("rows split", "rows dropped"),
        ("rows dropped", "rows fewer"),
    ]:
        out = tmp_path / f"{start} to {end}"
        before, after = repack(RepackOptions(str(tmp_path / start), str(out), workers=1, **layouts[end]))
        assert file_hashes(out) == file_hashes(tmp_path / end), out.name
        assert (before, after) == (manifest_of(tmp_path / start), manifest_of(tmp_path / end))
        assert not Path(f"{out}.partial").exists()


def test_repacked_pairs_are_those_that_a_build_gives(tmp_path: Path, corpus: Path, tokenizer_path: str) -> None:
    wide = {"source_length": 64, "target_length": 80, "rows_per_block": 3}
    for name, changes in (("narrow", {}), ("wide", wide)):
        build(pair_options(corpus, tmp_path / name, tokenizer_path, name="same", over_long="drop", **changes))
    dropped = manifest_of(tmp_path / "narrow").dropped
    repack(RepackOptions(str(tmp_path / "wide"), str(tmp_path / "again"), source_length=48, target_length=64,
                         rows_per_block=4, workers=1))  # fmt: skip
    assert file_hashes(tmp_path / "again") == file_hashes(tmp_path / "narrow")
    if dropped:
        with pytest.raises(DataError, match=rf"has left out {dropped} documents that were too long"):
            repack(RepackOptions(str(tmp_path / "narrow"), str(tmp_path / "no"), workers=1, source_length=64))


def test_the_command_says_what_has_changed_and_refuses_what_cannot_be(
    tmp_path: Path, corpus: Path, tokenizer_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _built(corpus, tmp_path / "a", tokenizer_path)
    source = str(tmp_path / "a")
    assert main(["data", "repack", source, str(tmp_path / "b"), "--row-tokens", "32", "--over-long", "split"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["source", "documents"]
    assert [line.split()[1] for line in lines[-2:]] == ["90", "90"]
    assert main(["data", "repack", source, str(tmp_path / "b"), "--block-tokens", "32"]) == 2
    assert "b exists. A source is never changed" in capsys.readouterr().err
    assert main(["data", "repack", source, str(tmp_path / "c"), "--row-tokens", "48"]) == 2
    assert "block_tokens=64 is no multiple of row_tokens=48" in capsys.readouterr().err
    assert main(["data", "repack", source, str(tmp_path / "c"), "--source-length", "48"]) == 2
    assert "source_length does not fit source same, which holds tokens" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "texts"]


def test_the_loader_reads_rows_of_whole_documents_without_their_padding(
    tmp_path: Path, corpus: Path, tokenizer_path: str
) -> None:
    manifest = _built(corpus, tmp_path / "rows", tokenizer_path, row_tokens=96, block_tokens=192, over_long="split")
    store = open_store(tmp_path / "rows")
    shape = BatchShape(
        rows=1, sequence_length=96, source_length=None, pad_id=manifest.pad_id, start_id=manifest.start_id
    )
    rows = SourceRows("rows", BlockReader(store, manifest), shape)
    expected = _rows(tmp_path / "rows")
    assert rows.num_rows == len(expected)
    assert rows.count_real_rows() == sum(1 for row in expected if row)
    for number, documents in enumerate(expected):
        row = rows.row(number // 2, number % 2)
        assert row.decoder_ids.tolist() == [token for document in documents for token in document]
        assert row.lengths.tolist() == [len(document) for document in documents]
        assert row.labels.tolist() == [label for document in documents for label in [*document[1:], IGNORED_LABEL]]
    with pytest.raises(DataError, match=r"sequence_length=48 does not fit source same.*batch.sequence_length=96"):
        manifest.rows_per_block_at(48)
