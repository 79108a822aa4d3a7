"""A build that is killed at a named point goes on: the same bytes in the end, nothing done twice, nothing left over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pretrain.data import build_plan, layout, stage_read
from pretrain.data.build import BuildOptions, build
from pretrain.data.build_stages import StageRunner
from pretrain.data.output import Output
from pretrain.errors import DataError
from pretrain.store.local import LocalStore
from tests.data_build.corpus import (
    documents_in,
    file_hashes,
    manifest_of,
    numbered_texts,
    pair_options,
    text_options,
    write_jsonl,
)

Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tasks in every stage of a corpus of a few kB."""
    monkeypatch.setattr(build_plan, "_PIECE_BYTES", 4000)
    monkeypatch.setattr("pretrain.data.build._LEAST_RANGE_BYTES", 2000)
    monkeypatch.setattr("pretrain.data.stage_encode._PART_TOKENS", 300)
    monkeypatch.setattr("pretrain.data.stage_pack.WINDOW_DOCUMENTS", 64)
    monkeypatch.setattr("pretrain.data.layout.WINDOW_DOCUMENTS", 64)


@pytest.fixture
def corpus(texts: Path) -> Path:
    records = [
        {"en": text[:60], "de": text[:80], "text": text, "id": f"n{n}"} for n, text in enumerate(numbered_texts(120))
    ]
    for number in range(4):
        write_jsonl(texts / f"{number}.jsonl", records[number::4])
    return texts


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_at_call(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, when: Callable[..., bool]
) -> None:
    """The process dies where `owner.name` is called for the number-th time with arguments that `when` accepts."""
    original, calls = getattr(owner, name), [0]

    def patched(*args: Any, **named: Any) -> Any:
        if when(*args):
            calls[0] += 1
            if calls[0] == number:
                _kill()
        return original(*args, **named)

    monkeypatch.setattr(owner, name, patched)


def _at_put(fragment: str, number: int) -> Patch:
    return lambda monkeypatch: _kill_at_call(
        monkeypatch, LocalStore, "put", number, lambda store, key, *_: fragment in key
    )


def _half_written(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LocalStore.put_stream

    def patched(store: LocalStore, key: str, chunks: Any) -> int:
        if key.endswith(".tar"):
            chunks = list(chunks)
            middle = b"".join(chunks)

            def half() -> Any:
                yield middle[: len(middle) // 2]
                _kill()

            return original(store, key, half())
        return original(store, key, chunks)

    monkeypatch.setattr(LocalStore, "put_stream", patched)


POINTS: dict[str, Patch] = {
    "reading": _at_put("read-", 4),
    "between reading and encoding": lambda patch: _kill_at_call(
        patch, StageRunner, "run", 1, lambda _, stage, *__: stage == "encode"
    ),
    "encoding": _at_put("encode-", 6),
    "dropping the runs": lambda patch: _kill_at_call(
        patch, LocalStore, "delete_tree", 1, lambda store, key: key.startswith("read-") and key.endswith("done")
    ),
    "packing": _at_put("pack-", 4),
    "writing": _at_put("write-", 4),
    "half a shard": _half_written,
    "publishing": lambda patch: _kill_at_call(patch, layout, "publish", 1, lambda *_: True),
    "between the manifests": _at_put("train/manifest.json", 1),
    "before the rename": lambda patch: _kill_at_call(patch, Output, "commit", 1, lambda *_: True),
    "after the rename": lambda patch: _kill_at_call(patch, Output, "clean", 1, lambda *_: True),
}


OF_PAIRS = ("packing",)  # what is left for them: the rest is the same for texts


def _killed(options: BuildOptions, patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the build in a forked process that dies at the point."""
    child = os.fork()
    if child == 0:
        try:
            patch(monkeypatch)
            monkeypatch.setattr("pretrain.data.build.publish", layout.publish)
            build(options)
        finally:
            os._exit(77)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the point was not reached: {os.WEXITSTATUS(status)}"


def _done_tasks(out: Path) -> int:
    work = Path(f"{out}.partial/work")
    whole = {path.parent for path in work.glob("*/stage.json")}
    if any(folder.name.startswith("encode-") for folder in whole):
        whole = {folder for folder in whole if not folder.name.startswith("read-")}  # nobody needs it any more
        for path in work.glob("read-*/done/*.json"):
            path.unlink()
    running = [path for path in work.glob("*/done/*.json") if path.parent.parent not in whole]
    return len(running) + sum(len(json.loads((folder / "stage.json").read_bytes())) for folder in whole)


@pytest.mark.parametrize("kind", ["text", "pairs"])
def test_a_build_killed_at_any_point_goes_on_to_the_same_bytes(
    tmp_path: Path, corpus: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    make = text_options if kind == "text" else pair_options
    changes: dict[str, Any] = {"validation_fraction": 0.2, "name": "same", "shard_blocks": 24 if kind == "text" else 4}
    calm = build(make(corpus, tmp_path / "calm", tokenizer_path, **changes))
    expected = file_hashes(tmp_path / "calm")
    for point, patch in POINTS.items():
        if (kind == "pairs") != (point in OF_PAIRS):
            continue
        out = tmp_path / point
        options = make(corpus, out, tokenizer_path, **changes)
        _killed(options, patch, monkeypatch)
        done = _done_tasks(out)
        notices: list[str] = []
        report = build(options, notice=notices.append)
        assert file_hashes(out) == expected, point
        assert not Path(f"{out}.partial").exists(), point
        if point != "after the rename":  # whose report is the dead build's own
            assert report.reused_tasks == done, point
            assert notices == [] or "goes on with an unfinished build" in notices[0]
        assert point == "reading" or report.reused_tasks > 0 or point == "after the rename"
        same = ("documents_read", "read_bytes", "duplicates", "empty", "too_long", "lengths", "files")
        assert [getattr(report, name) for name in same] == [getattr(calm, name) for name in same], point


def test_a_build_killed_again_and_again_ends_as_one_that_was_not(
    tmp_path: Path, corpus: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(text_options(corpus, tmp_path / "calm", tokenizer_path, name="same"))
    options = text_options(corpus, tmp_path / "torn", tokenizer_path, name="same")
    for point in ("reading", "encoding", "half a shard", "before the rename"):
        _killed(options, POINTS[point], monkeypatch)
    assert list((tmp_path / "torn.partial").rglob("*.tmp-*")) == []
    build(options)
    assert file_hashes(tmp_path / "torn") == file_hashes(tmp_path / "calm")


def test_a_changed_option_keeps_the_stages_that_it_does_not_shape(
    tmp_path: Path, corpus: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = text_options(corpus, tmp_path / "out", tokenizer_path, name="same")
    for changes, kept, told in [
        ({"block_tokens": 128}, "keeps what it has done in encode", "block_tokens=128 (was 64)"),
        ({"seed": 5}, "starts from the beginning", "seed=5 (was 0)"),
    ]:
        _killed(before, POINTS["writing"], monkeypatch)
        after = replace(before, **changes)
        notices: list[str] = []
        build(after, notice=notices.append)
        assert kept in notices[0]
        assert told in notices[0]
        build(replace(after, out=str(tmp_path / "fresh")))
        assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "fresh")
        for name in ("out", "fresh"):
            subprocess.run(["rm", "-r", str(tmp_path / name)], check=True)


def test_a_changed_input_is_read_again_and_named(
    tmp_path: Path, corpus: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = text_options(corpus, tmp_path / "out", tokenizer_path)
    _killed(options, POINTS["encoding"], monkeypatch)
    changed = corpus / "2.jsonl"
    times = changed.stat()
    changed.write_text(changed.read_text().replace("fox", "cat"))  # the same size
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))  # and the same time of change
    notices: list[str] = []
    build(options, notice=notices.append)
    assert f"input {changed} has changed; starts from the beginning" in notices[0]
    build(replace(options, out=str(tmp_path / "fresh"), name="out"))
    assert documents_in(tmp_path / "out", 0) == documents_in(tmp_path / "fresh", 0)


def test_an_input_that_changes_while_it_is_read_is_an_error(
    tmp_path: Path, corpus: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_file = stage_read.read_file

    def grows(file: Any, *rest: Any) -> Any:
        yield from read_file(file, *rest)
        with open(file.origin, "a") as opened:
            opened.write('{"text": "late"}\n')

    monkeypatch.setattr(stage_read, "read_file", grows)
    with pytest.raises(DataError, match=r"0.jsonl has changed while it was read .*Start it again"):
        build(text_options(corpus, tmp_path / "out", tokenizer_path))
    assert not list(tmp_path.glob("out*"))


def test_a_killed_builder_takes_its_workers_with_it_and_the_next_goes_on(
    tmp_path: Path, corpus: Path, tokenizer_path: str
) -> None:
    program = (
        "import os, signal, sys\nfrom pretrain.data.build import BuildOptions, build\n"
        "from pretrain.data.sources import SourceSpec\n"
        "def kill(progress):\n    if progress.phase == 'encode': os.kill(os.getpid(), signal.SIGKILL)\n"
        "build(BuildOptions(SourceSpec((sys.argv[1],)), sys.argv[2], sys.argv[3], workers=2, block_tokens=64, "
        "shard_blocks=16), kill)"
    )
    out = tmp_path / "out"
    process = subprocess.run([sys.executable, "-c", program, str(corpus), str(out), tokenizer_path], timeout=120)
    assert process.returncode == -9
    assert not out.exists()
    started = time.monotonic()
    build(text_options(corpus, out, tokenizer_path))  # that no worker is left is checked by the suite's own fixture
    assert time.monotonic() - started < 30
    build(text_options(corpus, tmp_path / "calm", tokenizer_path, name="out"))
    assert file_hashes(out) == file_hashes(tmp_path / "calm")
    assert manifest_of(out).documents == 120
