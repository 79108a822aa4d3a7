"""Options of `pretrain generate` and `evaluate` that would have no effect, or none that anybody wants, are refused."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from launch import cli
from launch.commands.generate import _lines
from launch.evaluation import check_writable
from launch.trained import _split

PROMPT = ("generate", "nothing", "--prompt", "a")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*PROMPT, "--top-k", "5"), "--top-k has no effect at --temperature=0"),
        ((*PROMPT, "--top-p", "0.9"), "--top-p has no effect at --temperature=0"),
        ((*PROMPT, "--beams", "2", "--top-k", "5"), "--top-k has no effect at --temperature=0"),
        ((*PROMPT, "--beams", "2", "--temperature", "1"), "exclude each other"),
        ((*PROMPT, "--length-penalty", "1"), "--length-penalty has no effect without --beams"),
        ((*PROMPT, "--score", "transformers"), "--score has no effect without --beams"),
        (("evaluate", "nothing", "--score", "paper"), "--score has no effect without --beams"),
        (("evaluate", "nothing", "--beams", "4"), "--beams has no effect without --pairs"),
        (("evaluate", "nothing", "--samples", "kept"), "--samples has no effect without --pairs"),
        (("evaluate", "nothing", "--max-pairs", "4"), "--max-pairs has no effect without --pairs"),
        (("evaluate", "nothing", "--max-tokens", "4"), "--max-tokens has no effect without --pairs"),
        (("evaluate", "nothing", "--source-field", "de"), "--source-field has no effect without --pairs"),
        (("evaluate", "nothing", "--target-field", "en"), "--target-field has no effect without --pairs"),
        (("evaluate", "nothing", "--follow", "--target-field", "en"), "--target-field does not go with --follow"),
        (("evaluate", "nothing", "--data", "a=x", "--data", "a=y"), "--data=a=y has a name that is taken"),
        (("evaluate", "nothing", "--follow", "--max-tokens", "4"), "--max-tokens does not go with --follow"),
        (("evaluate", "nothing", "--follow", "--max-pairs", "4"), "--max-pairs does not go with --follow"),
        (("evaluate", "nothing", "--follow", "--length-penalty", "1"), "--length-penalty does not go with --follow"),
    ],
)
def test_what_would_have_no_effect_is_refused_by_name(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(list(words)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [("--max-rows", "0"), ("--max-rows", "-1"), ("--max-pairs", "-1"), ("--max-tokens", "0"), ("--show", "-1")],
)
def test_counts_of_nothing_are_refused(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["evaluate", "nothing", *option])
    assert ended.value.code == 2
    assert f"argument {option[0]}: {option[1]!r} is not a whole number from" in capsys.readouterr().err


def test_lines_without_a_text_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lines").write_text("\n  \n")
    for name in ("lines", "nothing"):
        (tmp_path / "nothing").write_text("")
        assert cli.main(["generate", "nothing", "--file", str(tmp_path / name), "--lines"]) == 2
        assert "no line holds a text" in capsys.readouterr().err


def test_a_line_ends_where_a_file_ends_it_and_not_at_other_separators_of_unicode() -> None:
    assert _lines("a\u2028b\nc\x85d\x0ce\r\n\nf") == ["a\u2028b", "c\x85d\x0ce", "", "f"]
    assert _lines("a\n\n") == ["a", ""]
    assert _lines("") == []


def test_bytes_on_stdin_that_are_no_text_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff b"), encoding="utf-8"))
    assert cli.main(["generate", "nothing"]) == 2
    assert "stdin cannot be read: 'utf-8' codec can't decode byte 0xff" in capsys.readouterr().err


def test_samples_that_cannot_be_kept_are_told_before_anything_is_translated_and_older_ones_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"source": "a", "target": "b"}\n')
    place = tmp_path / "missing" / "samples"
    assert cli.main(["evaluate", "nothing", "--pairs", str(pairs), "--samples", str(place)]) == 2
    assert f"--samples={place} cannot be written" in capsys.readouterr().err  # and not that there is no such run
    older = tmp_path / "older"
    older.write_text("kept")
    check_writable(older)
    assert older.read_text() == "kept"


def test_weights_without_their_config_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert cli.main(["generate", str(tmp_path), "--prompt", "a"]) == 2
    assert f"{tmp_path} has weights and no config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "run", "checkpoint"),
    [
        ("small", "small", None),
        ("small:step-00000008-a001", "small", "step-00000008-a001"),
        ("/home/x/small", "/home/x/small", None),
        ("/home/x/small/checkpoints/step-00000008-a001", "/home/x/small", "step-00000008-a001"),
        ("small/checkpoints/step-00000008-a001/", "small", "step-00000008-a001"),
        ("s3://bucket/small/checkpoints/step-00000008-a001", "s3://bucket/small", "step-00000008-a001"),
        ("s3://bucket/small:step-00000008-a001", "s3://bucket/small", "step-00000008-a001"),
        ("small/checkpoints/other", "small/checkpoints/other", None),
    ],
)
def test_a_target_names_a_run_and_perhaps_a_checkpoint(target: str, run: str, checkpoint: str | None) -> None:
    assert _split(target) == (run, checkpoint)
