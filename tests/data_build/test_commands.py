from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import pretrain.data.progress as progress_module
from launch.build_view import describe_progress
from launch.cli import main
from pretrain.data.blocks import BlockReader
from pretrain.data.build import BuildProgress
from pretrain.data.progress import ProgressTeller
from pretrain.data.tokenizer import Tokenizer
from pretrain.store import open_store
from tests.data_build.corpus import documents_in, manifest_of, numbered_texts, write_jsonl


@pytest.fixture
def inputs(texts: Path) -> str:
    write_jsonl(texts / "a.jsonl", [{"text": text, "en": text[:20], "de": text} for text in numbered_texts(40)])
    return str(texts)


def test_tokenizer_and_build_from_the_command_line(
    tmp_path: Path, inputs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, out = str(tmp_path / "tokenizer.json"), str(tmp_path / "out")
    assert main(["tokenizer", "train", inputs, "--out", tokenizer, "--vocabulary-size", "290", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["sha256"] == Tokenizer.load(tokenizer).sha256
    assert facts["text_bytes"] == sum(len(text.encode()) for text in numbered_texts(40))

    words = [inputs, "--out", out, "--tokenizer", tokenizer, "--block-tokens", "64"]
    assert main(["data", "build", *words, "--validation-fraction", "0.2", "--max-bytes", "3KB", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["sources"]) == {"train", "validation"}
    assert report["sources"]["train"]["sha256"] == manifest_of(f"{out}/train").sha256
    kept = sum(source["documents"] for source in report["sources"].values())
    assert kept + report["not_selected"] == 40

    sources = [f"{out}/train", f"{out}/validation"]
    assert main(["data", "verify", *sources]) == 0
    assert capsys.readouterr().out.count(": good (") == 2
    assert main(["data", "stats", sources[0]]) == 0
    assert "tokens per document" in capsys.readouterr().out


def test_pairs_and_the_words_that_a_person_reads(
    tmp_path: Path, inputs: str, tokenizer_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    fields = ["--source-field", "en", "--target-field", "de", "--source-length", "32", "--target-length", "64"]
    assert main(["data", "build", inputs, "--out", out, "--tokenizer", tokenizer_path, *fields]) == 2
    assert "pairs fit no row" in capsys.readouterr().err
    fields += ["--over-long", "drop"]
    assert main(["data", "build", inputs, "--out", out, "--tokenizer", tokenizer_path, *fields]) == 0
    shown = capsys.readouterr()
    left_out = 40 - manifest_of(out).documents
    assert f"train: {out}: {40 - left_out} documents" in shown.out
    assert f"{left_out} longer than a row" in shown.out
    assert "MB/s" in shown.out
    assert "over_long=drop (was fail); keeps what it has done in encode\n" in shown.err
    assert "reading 1 file\nencode " in shown.err
    assert "% of the slots filled" in shown.out
    assert (tmp_path / "out" / "lengths.png").read_bytes().startswith(b"\x89PNG")
    assert main(["data", "stats", out, "--plot", str(tmp_path / "stats.png")]) == 0
    assert (tmp_path / "stats.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert main(["data", "stats", out, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)[0]["lengths"]) == {"source", "target"}


def test_verify_of_a_damaged_source_exits_2_and_names_it(
    tmp_path: Path, inputs: str, tokenizer_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["data", "build", inputs, "--out", str(out), "--tokenizer", tokenizer_path]) == 0
    data = bytearray((out / "00000.tar").read_bytes())
    data[700] ^= 1
    (out / "00000.tar").write_bytes(data)
    capsys.readouterr()
    assert main(["data", "verify", str(out), "--json"]) == 2
    (report,) = json.loads(capsys.readouterr().out)
    assert len(report["problems"]) == 2
    assert main(["data", "verify", str(out)]) == 2
    assert "block 0: tok.u2 does not match its crc32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data", "build", "none.txt", "--out", "o", "--tokenizer", "{tokenizer}"], "input 'none.txt' matches no file"),
        (["data", "build", "{inputs}", "--out", "{inputs}", "--tokenizer", "{tokenizer}"], "exists"),
        (["data", "build", "{inputs}", "--out", "o", "--tokenizer", "none.json"], "tokenizer=none.json cannot be read"),
        (["data", "build", "{inputs}", "--out", "o", "--tokenizer", "{tokenizer}", "--source-field", "en"], "together"),
        (["data", "build", "{inputs}", "--out", "o", "--tokenizer", "{tokenizer}", "--seed", "-1"], "seed=-1"),
        (["data", "verify", "{inputs}"], "holds no manifest.json"),
        (["data", "stats", "{inputs}"], "holds no manifest.json"),
        (["tokenizer", "train", "{inputs}", "--out", "{tokenizer}", "--vocabulary-size", "300"], "exists"),
        (["tokenizer", "train", "{inputs}", "--out", "t.json", "--vocabulary-size", "9"], "is too small"),
        (["data", "explain", "no-such-run", "--row", "1"], "no-such-run"),
    ],
)
def test_a_wrong_command_exits_2_with_one_error_line_and_leaves_nothing(
    tmp_path: Path,
    inputs: str,
    tokenizer_path: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([word.format(inputs=inputs, tokenizer=tokenizer_path) for word in words]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


@pytest.mark.parametrize("flag", ["--max-bytes", "--validation-fraction"])
def test_a_number_that_is_none_is_named_by_its_flag(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["data", "build", "x", "--out", "o", "--tokenizer", "t", flag, "lots"])
    assert caught.value.code == 2
    assert f"argument {flag}: 'lots' is not a" in capsys.readouterr().err


def test_progress_says_how_much_how_fast_and_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 MB, of which an earlier build had done 2: speeds and the time left are of what this one does."""
    seen: list[BuildProgress] = []
    clock = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: clock[0])
    teller = ProgressTeller(seen.append, files=3)
    clock[0] += 7
    teller.phase("encode", 24_000_000)
    teller.reuse(2_000_000, 500_000)
    clock[0] += 2
    teller.tick(10_000_000, 2_800_000)
    assert describe_progress(seen[-1]) == "encode 12.0/24.0 MB, 5.0 MB/s, 1.40 Mtok/s, 0:02 left"
    clock[0] += 1200
    assert seen[-1].seconds_left == pytest.approx(2.4)
    teller.tick(1, 1)
    assert describe_progress(seen[-1]).endswith("0.0 MB/s, 0.00 Mtok/s, 24:02 left")  # 12 MB at 10 MB in 1,202 s
    teller.phase("pack", None)
    teller.tick(3_000_000, 0)
    assert describe_progress(seen[-1]) == "pack 3.0 MB, 3,000.0 MB/s"


@pytest.mark.parametrize("kind", ["jsonl", "tar"])
def test_fields_that_the_command_names_are_read_and_stand_in_the_shards(
    tmp_path: Path, texts: Path, tokenizer_path: str, kind: str
) -> None:
    records = [{"body": text, "uid": f"u{n}", "url": f"http://{n}"} for n, text in enumerate(numbered_texts(12))]
    path = texts / f"a.{kind}"
    if kind == "jsonl":
        write_jsonl(path, [{**record, "text": "not this"} for record in records])
    else:
        with tarfile.open(path, "w") as archive:
            for number, record in enumerate(records):
                for suffix, data in (("json", json.dumps(record)), ("txt", record["body"])):
                    info = tarfile.TarInfo(f"part.1/{number:04d}.{suffix}")
                    info.size = len(data.encode())
                    archive.addfile(info, io.BytesIO(data.encode()))
    words = ["data", "build", path, "--out", tmp_path / "out", "--tokenizer", tokenizer_path, "--block-tokens", 64,
             "--text-field", "body", "--keep", "url", "--no-plot"]  # fmt: skip
    words += ["--id-field", "uid"] if kind == "jsonl" else []  # else the member's name
    assert main([str(word) for word in words]) == 0
    tokenizer = Tokenizer.load(tokenizer_path)
    found = documents_in(tmp_path / "out", tokenizer.eos_id)
    assert sorted(tokenizer.decode(ids) for ids in found) == sorted(record["body"] for record in records)
    reader = BlockReader(open_store(tmp_path / "out"), manifest_of(tmp_path / "out"))
    listed = [one for block in range(reader.manifest.blocks) for one in reader.provenance(block)[0]]
    origins = {(one.id, one.origin, one.line, str(one.metadata)) for one in listed}
    names = [f"u{n}" if kind == "jsonl" else f"part.1/{n:04d}" for n in range(12)]
    assert origins == {(name, str(path), n + 1, str({"url": f"http://{n}"})) for n, name in enumerate(names)}


def test_files_that_are_not_utf8_can_be_skipped(
    tmp_path: Path, texts: Path, tokenizer_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (texts / "good.py").write_text("x = 1\n")
    (texts / "bad.py").write_bytes(b"# \xe9\n")
    words = ["data", "build", str(texts), "--out", str(tmp_path / "out"), "--tokenizer", tokenizer_path]
    assert main(words) == 2
    assert "bad.py at byte 2 is not UTF-8" in capsys.readouterr().err
    assert main([*words, "--invalid-utf8", "skip"]) == 0
    assert "1 not UTF-8" in capsys.readouterr().out
    assert len(documents_in(tmp_path / "out", 0)) == 1


def test_importing_the_commands_loads_nothing_heavy() -> None:
    program = (
        "import argparse, sys\n"
        "from launch.commands import data, tokenizer\n"
        "parsers = argparse.ArgumentParser().add_subparsers()\n"
        "data.register(parsers); tokenizer.register(parsers)\n"
        "print([name for name in ('torch', 'numpy', 'tokenizers', 'ray', 'deepspeed') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "[]\n"


def test_the_workers_of_a_build_load_no_torch() -> None:
    program = "import sys, launch.data_build, pretrain.data.tasks; print('torch' in sys.modules, 'ray' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "False False\n"
