from __future__ import annotations

import json
import random
import shutil
import tarfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pretrain.data.build import build
from pretrain.data.format import (
    Manifest,
    Provenance,
    ShardIndex,
    canonical_json,
    decode_provenance,
    dtype_for,
    encode_provenance,
)
from pretrain.data.shard_writer import BlockCounts, SourceWriter, ustar_header
from pretrain.data.stats import source_stats
from pretrain.data.verify import VerifyReport, verify_source
from pretrain.errors import DataError
from pretrain.store import open_store
from pretrain.store.local import LocalStore
from tests.data_build.corpus import (
    documents_in,
    manifest_of,
    numbered_texts,
    pair_options,
    pairs_in,
    text_options,
    write_jsonl,
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tokenizer_path: str) -> Path:
    """A text and a pair source that are whole; tests damage copies."""
    root = tmp_path_factory.mktemp("built")
    texts = numbered_texts(60)
    build(
        text_options(write_jsonl(root / "t.jsonl", [{"text": text} for text in texts]), root / "text", tokenizer_path)
    )
    pairs = [{"en": text[:30], "de": text[:40]} for text in texts]
    build(pair_options(write_jsonl(root / "p.jsonl", pairs), root / "pairs", tokenizer_path))
    return root


@pytest.fixture
def text(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built / "text", tmp_path / "text"))


def _verify(directory: Path) -> VerifyReport:
    return verify_source(open_store(directory))


def _flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def test_what_was_built_is_good(built: Path) -> None:
    for name in ("text", "pairs"):
        report = _verify(built / name)
        assert report.problems == ()
        assert report.documents == 60
    sides = [side for row in pairs_in(built / "pairs") for pair in row for side in pair]
    assert report.tokens == sum(map(len, sides))


def test_shards_are_plain_tars_with_fixed_headers(built: Path) -> None:
    with tarfile.open(built / "text" / "00000.tar") as tar:
        members = tar.getmembers()
    assert [member.name for member in members[:3]] == ["00000000.tok.u2", "00000000.end.u4", "00000000.json"]
    assert {(member.mode, member.uid, member.gid, member.mtime, member.type) for member in members} == {
        (0o644, 0, 0, 0, tarfile.REGTYPE)
    }
    made = tarfile.TarInfo("00000000.tok.u2")
    made.size, made.mode, made.mtime = 12345, 0o644, 0
    ours, theirs = ustar_header("00000000.tok.u2", 12345), made.tobuf(tarfile.USTAR_FORMAT)
    assert tarfile.TarInfo.frombuf(ours, "ascii", "strict").get_info() == (
        tarfile.TarInfo.frombuf(theirs, "ascii", "strict").get_info()
    )


def test_the_index_says_where_the_tar_members_are(built: Path) -> None:
    manifest = manifest_of(built / "text")
    for number, shard in enumerate(manifest.shards):
        data = (built / "text" / f"{shard.name}.idx").read_bytes()
        index = ShardIndex.from_bytes(data, manifest, number, "index")
        with tarfile.open(built / "text" / shard.name) as tar:
            places = [(member.offset_data, member.size) for member in tar.getmembers()]
        spans = [index.span(row, member) for row in range(len(index)) for member in range(3)]
        assert [(span.offset, span.length) for span in spans] == places


@pytest.mark.parametrize("seed", range(12))
def test_any_flipped_bit_of_a_shard_is_found_and_named(text: Path, seed: int) -> None:
    shard = text / "00000.tar"
    rng = random.Random(seed)
    _flip(shard, rng.randrange(shard.stat().st_size), rng.randrange(8))
    problems = _verify(text).problems
    assert problems
    assert all("00000.tar" in problem for problem in problems)


def test_a_flipped_bit_names_the_block_and_member(text: Path) -> None:
    manifest = manifest_of(text)
    index = ShardIndex.from_bytes((text / "00000.tar.idx").read_bytes(), manifest, 0, "index")
    _flip(text / "00000.tar", index.span(3, 0).offset + 5)
    assert any("block 3: tok.u2 does not match its crc32" in problem for problem in _verify(text).problems)


def test_a_damaged_tar_header_is_found_though_tarfile_ends_silently(text: Path) -> None:
    manifest = manifest_of(text)
    index = ShardIndex.from_bytes((text / "00000.tar.idx").read_bytes(), manifest, 0, "index")
    data = bytearray((text / "00000.tar").read_bytes())
    header = index.span(2, 0).offset - 512
    data[header : header + 512] = bytes(512)
    (text / "00000.tar").write_bytes(data)
    with tarfile.open(text / "00000.tar") as tar:
        assert len(tar.getmembers()) == 2 * 3, "tarfile stops without an error"
    assert any("block 2: the tar header of tok.u2 is damaged" in problem for problem in _verify(text).problems)


@pytest.mark.parametrize("size", [0, 100, 2000, -1])
def test_a_truncated_shard_is_named_with_its_sizes(text: Path, size: int) -> None:
    shard = text / "00000.tar"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:size])
    found = _verify(text).problems
    assert f"00000.tar holds {len(whole[:size])} bytes, the manifest says {len(whole)}" in found[0]


def test_missing_files_are_named(text: Path) -> None:
    (text / "00001.tar").unlink()
    (text / "00000.tar.idx").unlink()
    found = _verify(text).problems
    assert any(problem.endswith("00001.tar is missing") for problem in found)
    assert any(problem.endswith("00000.tar.idx is missing") for problem in found)


def test_a_flipped_bit_of_an_index_is_found(text: Path) -> None:
    for position in (0, 100, (text / "00000.tar.idx").stat().st_size - 1):
        _flip(text / "00000.tar.idx", position, 3)
        assert "00000.tar.idx is damaged: its sha256 is not the manifest's" in _verify(text).problems[0]
        _flip(text / "00000.tar.idx", position, 3)


@pytest.mark.parametrize("seed", range(10))
def test_any_flipped_bit_of_a_manifest_is_refused(text: Path, seed: int) -> None:
    path = text / "manifest.json"
    before = json.loads(path.read_bytes())
    rng = random.Random(seed)
    _flip(path, rng.randrange(path.stat().st_size), rng.randrange(7))
    try:
        unchanged = json.loads(path.read_bytes()) == before  # white space between fields means nothing
    except ValueError:
        unchanged = False
    if not unchanged:
        with pytest.raises(DataError, match=r"manifest.json.* is damaged: .*rebuild it"):
            _verify(text)


def _rewrite(path: Path, change: Callable[[dict[str, object]], None]) -> None:
    """Changes a manifest and gives it a hash that fits."""
    import hashlib

    body = json.loads(path.read_bytes())
    del body["sha256"]
    change(body)
    path.write_text(json.dumps(body | {"sha256": hashlib.sha256(canonical_json(body)).hexdigest()}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.update(format_version=3), "format_version=3 is unknown"),
        (lambda body: body.pop("pad_id"), "fields missing or unknown: pad_id"),
        (lambda body: body.update(extra=1), "fields missing or unknown: extra"),
        (lambda body: body["shards"][0].pop("bytes"), "a shard entry is not whole"),
        (lambda body: body["shards"][0].update(colour="red"), "a shard entry is not whole"),
        (lambda body: body["shards"][0].update(bytes="many"), "a shard entry is not whole"),
        (lambda body: body.update(blocks=1), "blocks=1 is not what its shards sum to"),
    ],
)
def test_a_manifest_of_another_shape_is_refused(
    text: Path, change: Callable[[dict[str, object]], None], message: str
) -> None:
    _rewrite(text / "manifest.json", change)
    with pytest.raises(DataError, match=message):
        _verify(text)


def test_a_directory_without_a_manifest_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no manifest.json.*pretrain data build"):
        _verify(tmp_path)


def _written(directory: Path, header: Manifest, ids: list[int], ends: list[int], documents: int) -> Path:
    with SourceWriter(directory, header, shard_blocks=1) as writer:
        origins = [Provenance("d", "d", 0)] * documents
        arrays = [np.array(ids), np.array(ends)]
        writer.add(arrays, encode_provenance(origins), BlockCounts(len(ends), ends[-1], 0, 1))
        writer.close()
    return directory


def test_content_that_breaks_the_format_is_found_behind_right_checksums(tmp_path: Path) -> None:
    header = Manifest("x", "tokens", "t", 300, "u2", 0, 1, 2, block_tokens=4)
    assert _verify(_written(tmp_path / "good", header, [5, 0, 7, 0, 0], [2, 4], 2)).problems == ()
    cases = {
        "does not end with eos": ([5, 6, 7, 0, 0], [2, 4], 2),
        "not ascending": ([5, 0, 7, 0, 0], [4, 2, 4], 3),
        "3 documents in the provenance, 2 in the block": ([5, 0, 7, 0, 0], [2, 4], 3),
        "followed by token 9": ([5, 0, 7, 0, 9], [2, 4], 2),
    }
    for number, (message, content) in enumerate(cases.items()):
        found = _verify(_written(tmp_path / str(number), header, *content)).problems
        assert any(message in problem for problem in found), (message, found)
    wide = _written(tmp_path / "wide", header, [5, 0, 299, 0, 0], [2, 4], 2)
    _rewrite(wide / "manifest.json", lambda body: body.update(vocabulary_size=280))
    assert "token id 299 is outside the vocabulary of 280" in _verify(wide).problems[0]


def test_a_shard_that_does_not_go_on_where_the_one_before_it_ended_is_named(tmp_path: Path) -> None:
    header = Manifest("x", "tokens", "t", 300, "u2", 0, 1, 2, block_tokens=4)
    with SourceWriter(tmp_path / "two", header, shard_blocks=1) as writer:
        for ids in ([5, 0, 7, 0, 9], [6, 0, 8, 0, 0]):
            counts = BlockCounts(2, 4, 0, 1)
            writer.add([np.array(ids), np.array([2, 4])], encode_provenance([Provenance("d", "d", 0)] * 2), counts)
        writer.close()
    (problem,) = _verify(tmp_path / "two").problems
    assert problem.endswith("two/00001.tar: begins with token 6, the block before says 9")


class _Together(LocalStore):
    """Gives a shard only while another thread waits for one too."""

    barrier: threading.Barrier

    def get(self, key: str) -> bytes:
        if key.endswith(".tar"):
            self.barrier.wait()
        return super().get(key)


def test_shards_are_checked_side_by_side_and_the_report_is_that_of_one_after_the_other(text: Path) -> None:
    assert len(manifest_of(text).shards) == 4
    store = _Together(text)
    store.barrier = threading.Barrier(4, timeout=10)
    _flip(text / "00001.tar", 600)
    _flip(text / "00000.tar.idx", 9)
    together = verify_source(store, threads=4)
    assert together == verify_source(open_store(text), threads=1)
    assert len(together.problems) >= 3
    store.barrier = threading.Barrier(2, timeout=0.1)
    with pytest.raises(threading.BrokenBarrierError):
        verify_source(store, threads=1)


def test_provenance_comes_back_with_own_and_derived_ids() -> None:
    documents = [
        Provenance("a.txt", "a.txt", 0),
        Provenance("b.jsonl:7", "b.jsonl", 7),
        Provenance("own", "b.jsonl", 8),
    ]
    assert decode_provenance(encode_provenance(documents, continued=True)) == (documents, True)
    assert decode_provenance(encode_provenance([])) == ([], False)


def test_rows_per_block_and_location_of_blocks(built: Path) -> None:
    text, pairs = manifest_of(built / "text"), manifest_of(built / "pairs")
    assert [text.rows_per_block_at(length) for length in (64, 16, 1)] == [1, 4, 64]
    assert pairs.rows_per_block_at(64) == 4
    for manifest, length in ((text, 48), (text, 0), (pairs, 32)):
        with pytest.raises(DataError, match=f"sequence_length={length} "):
            manifest.rows_per_block_at(length)
    sizes = [shard.blocks for shard in text.shards]
    expected = [(number, row) for number, size in enumerate(sizes) for row in range(size)]
    assert [text.locate(block) for block in range(text.blocks)] == expected
    for block in (-1, text.blocks):
        with pytest.raises(IndexError):
            text.locate(block)


def test_the_dtype_is_narrow_only_while_every_id_fits() -> None:
    assert (dtype_for(65_536), dtype_for(65_537)) == ("u2", "u4")


def test_manifest_json_comes_back_equal(built: Path) -> None:
    manifest = manifest_of(built / "pairs")
    again = Manifest.from_json(replace(manifest, sha256="").to_json(), "again")
    assert again == manifest


def test_stats_equal_a_hand_count(built: Path) -> None:
    found = source_stats(open_store(built / "text"))
    documents = [len(ids) + 1 for ids in documents_in(built / "text", 0)]
    lengths = found.lengths["tokens"]
    assert (lengths["min"], lengths["max"], lengths["mean"]) == (min(documents), max(documents), np.mean(documents))
    assert lengths["median"] == np.median(documents)
    assert found.fill_fraction["tokens"] == sum(documents) / (found.manifest.blocks * 64)
    used = {token for ids in documents_in(built / "text", 0) for token in ids} | {0}
    assert found.ids_used == len(used)


def test_stats_of_pairs_equal_a_hand_count(built: Path) -> None:
    found = source_stats(open_store(built / "pairs"))
    pairs = [pair for row in pairs_in(built / "pairs") for pair in row]
    for side, name in enumerate(("source", "target")):
        sizes = [len(pair[side]) for pair in pairs]
        assert found.lengths[name]["mean"] == pytest.approx(np.mean(sizes))
        assert found.lengths[name]["max"] == max(sizes)
        capacity = (found.manifest.source_capacity, found.manifest.target_capacity)[side]
        assert found.fill_fraction[name] == sum(sizes) / (found.manifest.blocks * 4 * capacity)
