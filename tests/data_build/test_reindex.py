"""The index made anew is the one that the writer wrote, byte for byte, or the shard is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launch.cli import main
from pretrain.data.build import build
from pretrain.data.reindex import reindex_source
from pretrain.store import open_store
from tests.data_build.corpus import file_hashes, numbered_texts, pair_options, text_options, write_jsonl


@pytest.fixture(scope="module", params=["tokens", "pairs"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokenizer_path: str) -> Path:
    folder = tmp_path_factory.mktemp("reindex")
    records = [{"text": text, "en": text[:16], "de": text[:24]} for text in numbered_texts(300)]
    corpus = write_jsonl(folder / "a.jsonl", records)
    make = text_options if request.param == "tokens" else pair_options
    build(make(corpus, folder / "out", tokenizer_path, shard_blocks=5))
    return folder / "out"


def test_lost_and_damaged_indexes_come_back_byte_for_byte(built: Path, tmp_path: Path) -> None:
    expected = file_hashes(built)
    out = tmp_path / "out"
    shutil.copytree(built, out)
    indexes = sorted(out.glob("*.idx"))
    assert len(indexes) > 3
    assert reindex_source(open_store(out)).written == ()
    indexes[0].unlink()
    indexes[-1].write_bytes(b"x" + indexes[-1].read_bytes()[1:])
    report = reindex_source(open_store(out))
    assert report.written == (indexes[0].name, indexes[-1].name)
    assert (report.good, report.problems) == (len(indexes) - 2, ())
    assert file_hashes(out) == expected


def test_a_damaged_shard_is_named_and_gets_no_index(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(built, out)
    for name in ("00000", "00001", "00002", "00003"):
        (out / f"{name}.tar.idx").unlink()
    data = bytearray((out / "00000.tar").read_bytes())
    (out / "00000.tar").write_bytes(data[:600] + bytes([data[600] ^ 1]) + data[601:])  # a token
    header = bytearray((out / "00001.tar").read_bytes())
    (out / "00001.tar").write_bytes(bytes([header[0] ^ 1]) + header[1:])  # a member's name
    (out / "00002.tar").unlink()
    assert main(["data", "reindex", str(out)]) == 2
    shown = capsys.readouterr().out
    assert "00000.tar gives an index that is not the manifest's" in shown
    assert "00001.tar gives no index: bad checksum at byte 0" in shown
    assert "00002.tar is missing" in shown
    assert "00003.tar.idx" in shown
    assert sorted(path.name for path in out.glob("0000[0-3].tar.idx")) == ["00003.tar.idx"]
