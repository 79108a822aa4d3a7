"""Inputs on real servers: HTTP and S3."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

import pretrain.data.remote_input as remote_input
from pretrain.data.sources import SourceSpec, list_files, read_documents
from pretrain.data.tokenizer import train_bpe
from pretrain.errors import DataError, StoreError, UserError
from tests.data_build.servers import HttpServer, files_over_http, own_certificate, s3_server

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


def test_files_over_https_are_built_and_blocks_verified_and_an_unknown_certificate_is_refused(
    files: Path, tmp_path: Path
) -> None:
    certificate = own_certificate(tmp_path)
    tokenizer = tmp_path / "tokenizer.json"
    train_bpe(EXPECTED, 270).save(tokenizer)

    def pretrain(*words: str, trusted: Path) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "SSL_CERT_FILE": str(trusted)}
        command = [sys.executable, "-m", "launch.cli", "data", *words]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)

    with files_over_http(files, certificate=certificate) as server:
        options = ["--tokenizer", str(tokenizer), "--workers", "1", "--json", "--out"]
        built = pretrain("build", f"{server.url}/all.parquet", *options, str(files / "out"), trusted=certificate[0])
        assert built.returncode == 0, built.stderr
        ((_, source),) = json.loads(built.stdout)["sources"].items()
        assert source["documents"] == len(EXPECTED)
        verified = pretrain("verify", f"{server.url}/{Path(source['path']).relative_to(files)}", trusted=certificate[0])
        assert verified.returncode == 0, verified.stderr
        assert any(path.startswith("/out/") and path.endswith(".tar") for path in server.requests)
        nobody = tmp_path / "nobody.pem"
        nobody.write_bytes(own_certificate(tmp_path)[0].read_bytes())  # another one of the same name
        refused = pretrain("build", f"{server.url}/all.parquet", *options, str(files / "no"), trusted=nobody)
        assert refused.returncode in (2, 3)
        assert "certificate" in refused.stderr.lower()
        assert "Traceback" not in refused.stderr
        assert not (files / "no").exists()


@pytest.mark.parametrize("url", ["https://reader:hunter2@localhost/a.jsonl", "s3://key:hunter2@bucket/{a,b}.jsonl"])
def test_an_input_with_a_password_is_refused_before_anything_is_kept_and_does_not_show_it(url: str) -> None:
    with pytest.raises(DataError, match=r"holds a password.*Take it out of the URL") as caught:
        read(url)
    assert "hunter2" not in str(caught.value)


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
