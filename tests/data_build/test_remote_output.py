"""Builds that write to an S3 server: the same bytes as on disk, visible whole, resumable."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.data.build import build
from pretrain.data.repack import RepackOptions, repack
from pretrain.data.verify import verify_source
from pretrain.errors import DataError, StoreError
from pretrain.store import open_store
from pretrain.store.remote import RemoteStore
from tests.data_build.corpus import file_hashes, numbered_texts, text_options, write_jsonl
from tests.data_build.servers import s3_server


def _hashes(url: str) -> dict[str, str]:
    store = open_store(url)
    return {key: hashlib.sha256(store.get(key)).hexdigest() for key in store.list()}


def test_a_build_on_s3_is_the_one_on_disk_goes_on_after_a_failure_and_is_repacked_there(
    tmp_path: Path, texts: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_jsonl(texts / "c.jsonl", [{"text": text} for text in numbered_texts(60)])
    changes = {"name": "same", "validation_fraction": 0.2, "shard_blocks": 8}
    build(text_options(corpus, tmp_path / "disk", tokenizer_path, **changes))
    with s3_server("rclone", tmp_path / "server", monkeypatch) as bucket:
        url = f"{bucket}/sets/one"
        options = replace(text_options(corpus, Path("unused"), tokenizer_path, **changes), out=url)
        put, failed = RemoteStore.put, []

        def failing(store: RemoteStore, key: str, data: bytes) -> None:
            if key.endswith("train/manifest.json") and not failed:
                failed.append(key)
                raise StoreError("the server is gone")
            put(store, key, data)

        monkeypatch.setattr(RemoteStore, "put", failing)
        with pytest.raises(StoreError, match="the server is gone"):
            build(options)
        assert not open_store(url).exists("train/manifest.json")
        report = build(options)
        assert report.reused_tasks == report.tasks
        assert _hashes(url) == file_hashes(tmp_path / "disk")
        assert open_store(url + ".partial").list() == []
        assert verify_source(open_store(url + "/train")).problems == ()
        with pytest.raises(DataError, match=r"out=s3://bucket/sets/one exists"):
            build(options)
        repack(RepackOptions(f"{url}/train", f"{bucket}/sets/two", block_tokens=128, workers=1))
        repack(RepackOptions(str(tmp_path / "disk/train"), str(tmp_path / "two"), block_tokens=128, workers=1))
        assert _hashes(f"{bucket}/sets/two") == file_hashes(tmp_path / "two")
