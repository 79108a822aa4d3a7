"""Inputs on real servers: HTTP and S3."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

import pretrain.data.remote_input as remote_input
from pretrain.data.sources import SourceSpec, list_files, read_documents
from pretrain.errors import DataError, StoreError, UserError
from tests.data_build.servers import HttpServer, files_over_http, s3_server

EXPECTED = [f"text {number}" for number in range(300)]


def read(*inputs: str) -> list[str]:
    return [document.text for document in read_documents(SourceSpec(inputs))]


@pytest.fixture
def files(texts: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(remote_input, "_RETRY_WAITS_S", (0.0, 0.0, 0.0))
    for part in range(3):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in EXPECTED[part * 100 : part * 100 + 100])
        (texts / f"s {part:03d}.jsonl").write_text(lines)
    pa.parquet.write_table(pa.table({"text": EXPECTED}), texts / "all.parquet", row_group_size=50)
    return texts


@pytest.fixture
def server(files: Path) -> Iterator[HttpServer]:
    with files_over_http(files) as state:
        (files / "s%20000.jsonl").write_bytes((files / "s 000.jsonl").read_bytes())
        yield state


def test_files_over_http_by_braces_lines_and_tables(files: Path, server: HttpServer) -> None:
    for part in range(3):
        (files / f"s-{part:03d}.jsonl").write_bytes((files / f"s {part:03d}.jsonl").read_bytes())
    assert read(f"{server.url}/s-{{000..002}}.jsonl") == EXPECTED
    assert read(f"{server.url}/all.parquet") == EXPECTED
    assert read(f"{server.url}/s 000.jsonl") == EXPECTED[:100]  # asked for as %20
    (first, *_) = read_documents(SourceSpec((f"{server.url}/s-000.jsonl",)))
    assert (first.origin, first.line) == (f"{server.url}/s-000.jsonl", 1)
    with pytest.raises(DataError, match=r"/s-003\.jsonl' \(from .*\) matches no file"):
        read(f"{server.url}/s-{{000..003}}.jsonl")


@pytest.mark.parametrize("kind", ["error", "drop", "short"])
def test_a_failing_http_server_is_asked_again_and_at_last_an_error(server: HttpServer, kind: str) -> None:
    server.fault = lambda number, path: kind if number <= 3 else ""
    if kind == "short":  # says itself that it is shorter than the HEAD did
        server.fault = lambda number, path: kind if number <= 3 and path.endswith(".parquet") else ""
    assert read(f"{server.url}/all.parquet") == EXPECTED
    assert len(server.requests) == 4
    server.fault = lambda number, path: kind
    with pytest.raises(StoreError, match=r"all\.parquet cannot be read: \w+"):
        read(f"{server.url}/all.parquet")
    assert len(server.requests) == 8


def test_a_kind_of_url_that_nobody_serves_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"url=nosuch://x cannot be opened.*pip install"):
        read("nosuch://x")


def test_files_in_s3_by_name_folder_and_glob(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server("rclone", tmp_path / "s3", monkeypatch) as bucket:
        folder = tmp_path / "s3" / "bucket" / "deep"
        files.rename(folder)
        (folder / "image.png").write_bytes(b"x")
        assert read(f"{bucket}/deep/s 00*.jsonl") == EXPECTED
        assert read(f"{bucket}/deep/all.parquet") == EXPECTED
        listed = [file.origin for file in list_files(SourceSpec((f"{bucket}/deep",)))]
        assert listed == [f"{bucket}/deep/all.parquet", *(f"{bucket}/deep/s {part:03d}.jsonl" for part in range(3))]
        monkeypatch.setattr(remote_input, "_BUFFER_BYTES", 1000)  # many ranges
        assert read(f"{bucket}/deep/s {{000..002}}.jsonl") == EXPECTED
        with pytest.raises(DataError, match="matches no file"):
            read(f"{bucket}/deep/none*.jsonl")
