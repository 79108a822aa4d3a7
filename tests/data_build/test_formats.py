"""Formats other than text and JSON lines; damage of each is named. References: pyarrow, tarfile, webdataset."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard
from webdataset.tariterators import group_by_keys, tar_file_expander

from pretrain.data.blocks import BlockReader
from pretrain.data.build import BuildOptions, build
from pretrain.data.format import Provenance
from pretrain.data.sources import Document, ReadCounts, SourceSpec, read_documents
from pretrain.data.verify import verify_source
from pretrain.errors import DataError, UserError
from pretrain.store import open_store
from tests.data_build.corpus import manifest_of, webdataset_blocks, write_jsonl


def read(*inputs: Path | str, counts: ReadCounts | None = None, **changes: Any) -> list[Document]:
    return list(read_documents(SourceSpec(tuple(map(str, inputs)), **changes), counts))


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


# ----------------------------------------------------------------------------------------------- zstd


def test_zstd_of_several_frames_is_read_and_every_cut_is_named(texts: Path) -> None:
    lines = [b'{"text": "number %d"}\n' % number for number in range(200)]
    frames = [zstandard.compress(b"".join(lines[start : start + 50])) for start in range(0, 200, 50)]
    path = texts / "a.jsonl.zst"
    path.write_bytes(b"".join(frames))
    assert [item.text for item in read(texts)] == [f"number {number}" for number in range(200)]
    whole = path.read_bytes()
    borders = {sum(map(len, frames[:count])) for count in range(5)}
    for cut in range(1, len(whole)):
        if cut not in borders:
            path.write_bytes(whole[:cut])
            with pytest.raises(DataError, match=r"a\.jsonl\.zst is damaged"):
                read(texts)


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (texts / "a.txt.zst").write_bytes(zstandard.compress(b"x"))
    pa.parquet.write_table(pa.table({"text": ["x"]}), texts / "b.parquet")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UserError, match=r"a\.txt\.zst needs the package zstandard.*pip install zstandard"):
        read(texts / "a.txt.zst")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"b\.parquet needs the package pyarrow.*pip install pyarrow"):
        read(texts / "b.parquet")


# --------------------------------------------------------------------------------------------- tables


def test_parquet_gives_text_id_and_kept_columns_by_row(texts: Path) -> None:
    table = pa.table(
        {
            "content": pa.array(["one", None, "three", "four"]).dictionary_encode(),
            "doc": pa.array([11, 12, None, 14]),
            "meta": pa.array([{"url": "u", "score": 0.5}, None, None, {"url": "v", "score": 1.0}]),
            "big": pa.array([b"\xff"] * 4),
        }
    )
    pa.parquet.write_table(table, texts / "a.parquet", row_group_size=3)
    counts = ReadCounts()
    found = read(texts, counts=counts, text_field="content", id_field="doc", keep_fields=("meta",))
    path = f"{texts}/a.parquet"
    assert found == [
        Document("11", "one", None, path, 1, {"meta": {"url": "u", "score": 0.5}}),
        Document(f"{path}:3", "three", None, path, 3, None),
        Document("14", "four", None, path, 4, {"meta": {"url": "v", "score": 1.0}}),
    ]
    assert counts.empty == 1


@pytest.mark.parametrize("text_type", [pa.string(), pa.large_string(), pa.string_view()])
@pytest.mark.parametrize("kind", ["stream", "file"])
def test_arrow_files_of_both_kinds_and_every_text_type(texts: Path, text_type: pa.DataType, kind: str) -> None:
    expected = [f"text {number} é" for number in range(2500)]
    batches = pa.table({"text": pa.array(expected, text_type)}).to_batches(max_chunksize=1100)
    make = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with make(texts / "a.arrow", batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    found = read(texts)
    assert [item.text for item in found] == expected
    assert [item.line for item in found] == list(range(1, 2501))


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_an_arrow_file_cut_anywhere_is_named_also_between_its_batches(texts: Path, kind: str) -> None:
    batches = pa.table({"text": [f"text {number}" for number in range(12)]}).to_batches(max_chunksize=4)
    path = texts / "a.arrow"
    with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(path, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    whole = path.read_bytes()
    assert len(read(texts)) == 12
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"a\.arrow is damaged after row \d+: "):
            read(texts)


def test_text_in_a_table_that_is_not_utf8_names_its_row(texts: Path) -> None:
    offsets, data = pa.py_buffer(b"\0\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"ok\xff")
    column = pa.StringArray.from_buffers(2, offsets, data)
    with pa.ipc.new_stream(texts / "a.arrow", pa.schema({"text": pa.string()})) as writer:
        writer.write_batch(pa.record_batch([column], names=["text"]))
    with pytest.raises(DataError, match=r"a\.arrow row 2 is not UTF-8 \(0xff\)"):
        read(texts)
    counts = ReadCounts()
    assert [item.text for item in read(texts, counts=counts, skip_invalid=True)] == ["ok"]
    assert counts.invalid == 1


def test_pairs_come_from_two_columns(texts: Path) -> None:
    pa.parquet.write_table(pa.table({"en": ["a", "b"], "de": ["A", "B"]}), texts / "a.parquet")
    found = read(texts, source_field="en", target_field="de")
    assert [(item.text, item.target) for item in found] == [("a", "A"), ("b", "B")]


def test_damaged_and_unfit_tables_are_named(texts: Path) -> None:
    path = texts / "a.parquet"
    pa.parquet.write_table(pa.table({"text": ["x" * 100] * 50, "n": list(range(50))}), path)
    with pytest.raises(DataError, match=r"a\.parquet has no field 'body' \(it has: n, text\).*--text-field"):
        read(texts, text_field="body")
    with pytest.raises(DataError, match="column 'n' is int64, not text"):
        read(texts, text_field="n")
    whole = path.read_bytes()
    for size in (0, 3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"a\.parquet is damaged after row 0"):
            read(texts)
    (texts / "a.parquet").rename(texts / "a.parquet.gz")
    with pytest.raises(DataError, match="compresses inside"):
        read(texts / "a.parquet.gz")


def _save_dataset(directory: Path, parts: list[list[str]], **state: Any) -> Path:
    """The files that `datasets.Dataset.save_to_disk` writes (versions 4 and 5)."""
    directory.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(parts):05d}.arrow" for number in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        table = pa.table({"text": part})
        with pa.OSFile(str(directory / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    (directory / "dataset_info.json").write_text("{}")
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]} | state))
    return directory


def test_a_dataset_saved_on_disk_is_read_and_splits_are_not_mixed(texts: Path) -> None:
    saved = _save_dataset(texts / "saved", [["a", "b"], ["c"]])
    assert [item.text for item in read(saved)] == ["a", "b", "c"]
    several = texts / "several"
    for split in ("train", "test"):
        _save_dataset(several / split, [[split]])
    (several / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"holds the splits train, test.*Name those to read, such as .*/train"):
        read(several)
    assert [item.text for item in read(several / "test")] == ["test"]
    chosen = _save_dataset(texts / "chosen", [["a"]], _indices_files=[{"filename": "indices.arrow"}])
    with pytest.raises(DataError, match="flatten_indices"):
        read(chosen)
    (saved / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00002\.arrow cannot be read: No such file"):
        read(saved)


_SAVES = """
import json, sys, datasets
folder, texts = sys.argv[1], json.loads(sys.argv[2])
whole = datasets.Dataset.from_dict({"text": texts, "id": [f"n{n}" for n in range(len(texts))]})
whole.save_to_disk(f"{folder}/whole", num_shards=3)
chosen = whole.shuffle(seed=1).select(range(5))
chosen.save_to_disk(f"{folder}/chosen")
datasets.DatasetDict({"train": whole, "test": chosen}).save_to_disk(f"{folder}/several")
print(json.dumps({"whole": whole["text"][:], "chosen": chosen["text"][:], "ids": chosen["id"][:]}))
"""


def test_what_the_library_datasets_saves_is_read_as_it_reads_it(texts: Path) -> None:
    written = [f"number {number}: ü\n\n€ {'x' * number}" for number in range(11)]
    done = subprocess.run(
        [sys.executable, "-c", _SAVES, str(texts / "saved"), json.dumps(written)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "HF_HOME": str(texts / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout)
    assert [item.text for item in read(texts / "saved" / "whole")] == theirs["whole"] == written
    chosen = read(texts / "saved" / "chosen")
    assert [item.text for item in chosen] == theirs["chosen"]
    assert [item.id for item in chosen] == theirs["ids"]
    with pytest.raises(DataError, match="holds the splits train, test"):
        read(texts / "saved" / "several")
    assert [item.text for item in read(texts / "saved" / "several" / "test")] == theirs["chosen"]


# ------------------------------------------------------------------------------------------------ tars


def test_documents_of_a_tar_are_those_that_webdataset_reads(texts: Path) -> None:
    members = []
    for number in range(30):
        if number % 3:
            members.append((f"part{number % 2}/{number:04d}.txt", f"text {number}".encode()))
        fields = {"url": f"http://{number}", "text": f"in json {number}"}
        members.append((f"part{number % 2}/{number:04d}.json", json.dumps(fields).encode()))
    path = write_tar(texts / "a.tar", members)
    expected = []
    with path.open("rb") as stream:
        for sample in group_by_keys(tar_file_expander([{"url": "a", "stream": stream}])):
            fields = json.loads(sample["json"])
            text = sample["txt"].decode() if "txt" in sample else fields["text"]
            expected.append((sample["__key__"], text, fields["url"]))
    found = read(texts, keep_fields=("url",))
    assert [(item.id, item.text, (item.metadata or {})["url"]) for item in found] == expected
    assert [item.line for item in found] == list(range(1, 31))


def test_dots_and_folders_in_names_of_members_keep_documents_apart(texts: Path) -> None:
    names = ["doc.v1.0.txt", "doc.v2.0.txt", "train.v1/0001.txt", "b/0001.txt", "long/" + "x" * 180 + ".txt"]
    path = write_tar(texts / "a.tar", [(name, name.encode()) for name in names])
    found = read(path)
    assert [item.text for item in found] == names
    assert [item.id for item in found] == [name.removesuffix(".txt") for name in names]


def test_compressed_tars_pairs_in_json_and_other_members(texts: Path) -> None:
    members = [
        ("1.json", b'{"en": "a", "de": "A", "id": "first"}'),
        ("1.jpg", b"\xff\xd8"),
        ("2.json", b'{"en": "b", "de": "B"}'),
    ]
    data = write_tar(texts / "a.tar", members).read_bytes()
    (texts / "a.tar").unlink()
    for name, packed in (("a.tar.gz", gzip.compress(data)), ("a.tar.zst", zstandard.compress(data))):
        (texts / name).write_bytes(packed)
        counts = ReadCounts()
        found = read(texts / name, source_field="en", target_field="de", counts=counts)
        assert [(item.id, item.text, item.target) for item in found] == [("first", "a", "A"), ("2", "b", "B")]
        assert counts.other_members == 1


def test_a_member_twice_is_named(texts: Path) -> None:
    path = write_tar(texts / "a.tar", [("b/1.txt", b"x"), ("b/2.txt", b"y"), ("b/1.txt", b"z")])
    with pytest.raises(DataError, match=r"a\.tar holds the member b/1\.txt twice"):
        read(path)


def test_a_header_damaged_anywhere_and_a_cut_anywhere_are_found(texts: Path) -> None:
    whole = write_tar(texts / "a.tar", [(f"{n:02d}.txt", b"text %d" % n) for n in range(20)]).read_bytes()
    path = texts / "a.tar"
    members = 20 * 1024
    for number in range(20):
        damaged = bytearray(whole)
        damaged[number * 1024 : number * 1024 + 512] = b"\x55" * 512
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"a\.tar is damaged" + (f" after {number} members" if number else "")):
            read(path)
    # 1,536 is 512 bytes into the second member: a border is as good a cut as any
    for cut in (1, 511, 512, 700, 1024, 1536, 5000, 10 * 1024, members - 1, members):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"a\.tar is damaged"):
            read(path)
    path.write_bytes(whole[: members + 1024])  # the two blocks of the end are enough
    assert len(read(path)) == 20


def test_an_empty_tar_is_nothing_a_file_of_no_bytes_is_an_error_and_a_good_neighbour_is_read(texts: Path) -> None:
    write_tar(texts / "a.tar", [])
    write_tar(texts / "b.tar", [("1.txt", b"good")])
    assert [item.text for item in read(texts)] == ["good"]
    (texts / "c.tar").write_bytes(b"")
    with pytest.raises(DataError, match=r"c\.tar is damaged: empty header at byte 0"):
        read(texts)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("1.json", b"{", r"a\.tar member 1\.json is not JSON"),
        ("1.json", b"[]", r"a\.tar member 1\.json is not a JSON object"),
        ("1.json", b'{"body": "x"}', r"a\.tar member 1 has no field 'text' \(it has: body\)"),
        ("1.txt", b"ab\xff", r"a\.tar member 1 at byte 2 is not UTF-8"),
    ],
)
def test_a_wrong_member_is_named(texts: Path, name: str, data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(write_tar(texts / "a.tar", [("0.txt", b"fine"), (name, data)]))


# ----------------------------------------------------------------------------------------- all of them


def test_a_field_that_is_asked_for_and_never_occurs_is_an_error(texts: Path) -> None:
    write_jsonl(texts / "a.jsonl", [{"text": "x", "url": "u"}, {"text": "y"}])
    found = read(texts, keep_fields=("url",))
    assert [item.metadata for item in found] == [{"url": "u"}, None]
    with pytest.raises(DataError, match=r"no document has a field 'ulr'.*Correct --keep ulr"):
        read(texts, keep_fields=("ulr",))
    with pytest.raises(DataError, match=r"Correct --id-field uuid"):
        read(texts, id_field="uuid")


def test_kept_fields_come_out_of_the_shards_and_change_no_token(
    texts: Path, tmp_path: Path, tokenizer_path: str
) -> None:
    records = [{"text": f"text {number}", "url": f"http://é/{number}", "n": number} for number in range(40)]
    write_jsonl(texts / "a.jsonl", [*records, {"text": "without"}])
    found = {}
    for name, keep in (("kept", ("url", "n")), ("plain", ())):
        spec = SourceSpec((str(texts),), keep_fields=keep)
        build(BuildOptions(spec, str(tmp_path / name), tokenizer_path, block_tokens=64, workers=1))
        blocks = webdataset_blocks(tmp_path / name)
        found[name] = [block["tok"] for block in blocks]
        assert verify_source(open_store(tmp_path / name)).problems == ()
        reader = BlockReader(open_store(tmp_path / name), manifest_of(tmp_path / name))
        origins = {item for block in range(len(blocks)) for item in map(_hashable, reader.provenance(block)[0])}
        wanted = {(n + 1, json.dumps({"n": n, "url": f"http://é/{n}"}) if keep else "null") for n in range(40)}
        assert origins == wanted | {(41, "null")}
    assert found["kept"] == found["plain"]


def _hashable(item: Provenance) -> tuple[int, str]:
    return item.line, json.dumps(item.metadata, sort_keys=True)
