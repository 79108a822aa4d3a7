from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from pretrain.data.sources import ReadCounts, SourceSpec, expand_braces, list_files, read_documents
from pretrain.errors import DataError
from tests.data_build.corpus import write_jsonl


def _read(*inputs: Path | str, **changes: object) -> tuple[list[str], ReadCounts]:
    counts = ReadCounts()
    spec = SourceSpec(tuple(map(str, inputs)), **changes)  # type: ignore[arg-type]
    return [document.text for document in read_documents(spec, counts)], counts


def test_a_tree_is_read_in_sorted_order_without_hidden_and_unknown_files(texts: Path) -> None:
    for name in ("b/2.txt", "a.v1/1.txt", "b/1.py", ".git/x.txt", "b/.hidden.txt", "b/image.png", "c.rst"):
        path = texts / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    assert _read(texts)[0] == ["a.v1/1.txt", "b/1.py", "b/2.txt", "c.rst"]
    assert _read(texts, include=("*.png", "1.*"))[0] == ["a.v1/1.txt", "b/1.py", "b/image.png"]


def test_dots_in_names_and_equal_names_in_two_directories_stay_apart(texts: Path) -> None:
    for name in ("doc.v1.0.txt", "doc.v2.0.txt", "train.v1/0001.txt", "b/0001.txt"):
        (texts / name).parent.mkdir(exist_ok=True)
        (texts / name).write_text(name)
    documents = list(read_documents(SourceSpec((str(texts),))))
    assert len({document.id for document in documents}) == len({document.text for document in documents}) == 4


def test_json_lines_give_text_id_and_line(texts: Path) -> None:
    path = texts / "a.jsonl"
    path.write_text('{"text": "one", "id": "first"}\n\n{"text": "two", "id": ""}\n{"text": "three", "id": 7}\n')
    documents = list(read_documents(SourceSpec((str(path),))))
    assert [(item.id, item.text, item.line) for item in documents] == [
        ("first", "one", 1),
        (f"{path}:3", "two", 3),
        ("7", "three", 4),
    ]


def test_what_parsers_of_json_read_in_different_ways_is_read_as_python_reads_it(texts: Path) -> None:
    """Numbers beyond 64 bits, infinity, NaN, lone surrogates, a name twice, a byte order mark, blanks around."""
    large = 2**64 + 1
    lines = [f'{{"text": "a", "id": {large}}}', f'{{"text": "b", "id": {-large}}}', '{"text": "c", "score": 1e400}',
             '{"text": "d", "score": NaN, "id": "four"}', '{"text": "e", "id": "\\ud800"}',
             '{"text": "f", "text": "g"}', ' \t{"text": "h", "id": 1.5} ']  # fmt: skip
    path = texts / "odd.jsonl"
    path.write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    found = list(read_documents(SourceSpec((str(texts),))))
    assert [document.text for document in found] == [*"abcdegh"]
    ids = [str(large), str(-large), f"{path}:3", "four", "\ufffd", f"{path}:6", f"{path}:7"]
    assert [document.id for document in found] == ids


def test_gzip_is_read_and_a_cut_gzip_is_named(texts: Path) -> None:
    data = gzip.compress(b'{"text": "zipped"}\n' * 50)
    (texts / "a.jsonl.gz").write_bytes(data)
    assert _read(texts)[0] == ["zipped"] * 50
    (texts / "a.jsonl.gz").write_bytes(data[:-20])
    with pytest.raises(DataError, match=r"a.jsonl.gz is damaged"):
        _read(texts)


@pytest.mark.parametrize("name", ["bad.txt", "bad.jsonl"])
def test_text_that_is_not_utf8_names_file_and_offset(texts: Path, name: str) -> None:
    lines = b"fine\n" if name.endswith("txt") else b'{"text": "fine"}\n'
    (texts / name).write_bytes(lines + b'{"text": "\xff"}\n')
    offset = len(lines) + 10
    with pytest.raises(DataError, match=rf"{name} at byte {offset} is not UTF-8 \(0xff\).*--invalid-utf8 skip"):
        _read(texts)
    (texts / "good.txt").write_text("good")
    found, counts = _read(texts, skip_invalid=True)
    assert found == (["good"] if name == "bad.txt" else ["fine", "good"])
    assert counts.invalid == 1
    assert counts.invalid_examples == [f"{texts / name} at byte {offset}"]


def test_lone_surrogates_are_replaced_and_counted_pairs_of_them_are_characters(texts: Path) -> None:
    path = texts / "a.jsonl"
    path.write_text('{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude00"}\n')
    found, counts = _read(path)
    assert found == ["a\ufffdb", "😀"]
    assert counts.repaired == 1


def test_byte_order_mark_is_dropped_nul_and_crlf_are_kept(texts: Path) -> None:
    (texts / "a.txt").write_bytes(b"\xef\xbb\xbfa\0b\r\nc")
    (texts / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "d\\u0000"}\r\n')
    assert _read(texts)[0] == ["a\0b\r\nc", "d\0"]


def test_documents_without_text_are_skipped_and_counted(texts: Path) -> None:
    write_jsonl(texts / "a.jsonl", [{"text": text} for text in ("", " \n", "x")])
    (texts / "empty.txt").write_bytes(b"")
    found, counts = _read(texts)
    assert (found, counts.empty, counts.documents) == (["x"], 3, 1)


def test_a_pair_with_an_empty_side_is_skipped(texts: Path) -> None:
    path = write_jsonl(texts / "a.jsonl", [{"en": "a", "de": "b"}, {"en": "a", "de": ""}, {"en": " ", "de": "b"}])
    counts = ReadCounts()
    documents = list(read_documents(SourceSpec((str(path),), source_field="en", target_field="de"), counts))
    assert [(item.text, item.target) for item in documents] == [("a", "b")]
    assert counts.empty == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x"}', r"a.jsonl:2 has no field 'text' \(it has: body\).*--text-field"),
        ('{"text": 3}', "a.jsonl:2: field 'text' is int, not text"),
        ('{"text": ', "a.jsonl:2 is not JSON"),
        ('["x"]', "a.jsonl:2 is not a JSON object"),
    ],
)
def test_a_wrong_line_is_named(texts: Path, line: str, message: str) -> None:
    (texts / "a.jsonl").write_text('{"text": "x"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        _read(texts)


def test_patterns_braces_and_names_with_brackets_are_expanded_as_meant(texts: Path) -> None:
    for name in ("s-08.txt", "s-09.txt", "s-10.txt", "a b [1].txt"):
        (texts / name).write_text(name)
    names = lambda *inputs: [path.name for path in list_files(SourceSpec(inputs))]  # noqa: E731
    assert names(f"{texts}/s-*.txt") == ["s-08.txt", "s-09.txt", "s-10.txt"]
    assert names(f"{texts}/s-{{08..10}}.txt") == ["s-08.txt", "s-09.txt", "s-10.txt"]
    assert names(f"{texts}/s-{{10,08}}.txt") == ["s-10.txt", "s-08.txt"]
    assert names(f"{texts}/a b [1].txt") == ["a b [1].txt"]
    (texts / "deep" / "er").mkdir(parents=True)
    (texts / "deep" / "er" / "t-1.txt").write_text("x")
    assert names(f"{texts}/**/?-*.txt") == ["t-1.txt", "s-08.txt", "s-09.txt", "s-10.txt"]
    (texts / "deep" / "er" / "t-1.txt").unlink()
    assert names(str(texts), f"{texts}/s-08.txt") == ["a b [1].txt", "s-08.txt", "s-09.txt", "s-10.txt"]


def test_folders_that_exist_are_taken_as_they_are_written_before_a_pattern(texts: Path) -> None:
    """Cleaned copies are often called `web[1]` or `{raw}`; only what is behind them is a pattern."""
    for folder in ("web[1]", "{x,y}/a [*]", "web1", "x/a b"):
        (texts / folder).mkdir(parents=True)
        (texts / folder / "1.txt").write_text(folder)
        (texts / folder / "2.txt").write_text(folder)
    names = lambda *inputs: [file.origin for file in list_files(SourceSpec(inputs))]  # noqa: E731
    assert names(f"{texts}/web[1]/*.txt") == [f"{texts}/web[1]/1.txt", f"{texts}/web[1]/2.txt"]
    assert names(f"{texts}/{{x,y}}/a [*]/{{2,1}}.txt") == [f"{texts}/{{x,y}}/a [*]/{n}.txt" for n in (2, 1)]
    assert names(f"{texts}/[vx]/a?b/1.txt") == [f"{texts}/x/a b/1.txt"]


def test_braces_nest_by_product_and_leave_others_alone() -> None:
    assert expand_braces("{a,b}{1..2}") == ["a1", "a2", "b1", "b2"]
    assert expand_braces("x{}y{z}") == ["x{}y{z}"]


@pytest.mark.parametrize("name", ["none.txt", "none-*.jsonl", "s-{0..3}.txt"])
def test_an_input_that_matches_nothing_is_an_error(texts: Path, name: str) -> None:
    (texts / "s-0.txt").write_text("x")
    with pytest.raises(DataError, match="matches no file"):
        _read(texts / name)


def test_what_auto_cannot_tell_and_half_a_pair_are_refused(texts: Path) -> None:
    (texts / "a.xyz").write_text("x")
    with pytest.raises(DataError, match="format=auto cannot tell"):
        _read(texts / "a.xyz")
    assert _read(texts / "a.xyz", format="text")[0] == ["x"]
    with pytest.raises(DataError, match="holds no fitting file"):
        _read(texts)
    with pytest.raises(DataError, match="go together"):
        SourceSpec(("a.jsonl",), source_field="en")
    with pytest.raises(DataError, match="is not JSON lines"):
        list(read_documents(SourceSpec((str(texts / "a.xyz"),), source_field="en", target_field="de")))


def test_json_with_every_escape_comes_back(texts: Path) -> None:
    text = 'quote " slash \\ tab \t line \n nul \0 é 日 😀'
    assert _read(write_jsonl(texts / "a.jsonl", [{"text": text}]))[0] == [text]
    assert json.loads(json.dumps(text)) == text


def test_a_file_name_that_is_not_utf_8_is_spelt_out(texts: Path) -> None:
    (texts / os.fsdecode(b"caf\xe9.txt")).write_text("a text")
    (document,) = read_documents(SourceSpec((str(texts),)))
    assert document.text == "a text"
    assert document.id == document.origin == f"{texts}/caf\\xe9.txt"
