"""`pretrain watch`: the picture, the lines elsewhere, and a real pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import cli
from launch.monitor.reader import RunReader
from launch.monitor.terminal import kept_values, render, sparkline
from pretrain.rundir import RunDirectory, this_process
from tests.monitor.journals import Journal, step
from tests.monitor.runs import add_events, write_run
from tests.monitor.test_ledger import calm


def living(home: Path) -> Path:
    """A run that this process holds: killed at step 15, gone on from 10, now at 12."""
    journal = Journal().at(0, "created").at(0, "attempt_started", attempt=1, ranks=2, host="here", why="first start")
    journal.at(12, "committed", attempt=1, step=10, checkpoint="step-00000010-a001")
    journal.at(20, "fault", attempt=1, cause="application", rank=1, message="rank 1 was killed\nsecond line")
    journal.at(20, "attempt_ended", attempt=1, outcome="failed")
    journal.at(21, "attempt_started", attempt=2, ranks=2, host="here").at(22, "restored", attempt=2, step=10)
    first = [{**step(12, 10, 1.0), "loss": 3.0}, {**step(17, 15, 1.0), "loss": 9.0}]
    records = {1: first, 2: [{**step(24, 12, 1.0), "loss": 2.5, "eta_s": 75.0, "gradient_norm": 1.5}]}
    return Path(write_run(home, "torn", journal.events, records, holder=this_process()).url)


def test_the_picture_says_state_step_loss_time_attempts_and_faults(tmp_path: Path) -> None:
    reader = RunReader(cli_run(living(tmp_path)))
    reader.refresh()
    lines = render(reader, 80, time.time(), colour=False)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("torn  ● running")
    for fact in ("12/", "1m15s left", "loss       2.5000", "100 tokens/s", "goodput", "attempt    2: 2 ranks on here"):
        assert fact in text
    assert "rank 1 was killed" in text
    assert "second line" not in text
    assert "step-00000010-a001" in text


def test_curves_show_only_the_line_that_counts(tmp_path: Path) -> None:
    reader = RunReader(cli_run(living(tmp_path)))
    reader.refresh()
    assert kept_values(reader, "loss") == [3.0, 2.5]


def test_colours_are_used_only_where_they_are_wanted(tmp_path: Path) -> None:
    reader = RunReader(cli_run(living(tmp_path)))
    reader.refresh()
    plain = render(reader, 60, time.time(), colour=False)
    painted = render(reader, 60, time.time(), colour=True)
    assert "\x1b" not in "".join(plain)
    assert [re.sub(r"\x1b\[\d+m", "", line) for line in painted] == plain


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [([], 5, ""), ([1.0], 5, "▁"), ([0.0, 7.0], 5, "▁█"), ([0, 2, 6, 8], 2, "▁█"), ([1.0, float("nan"), 1.0], 5, "▁▁")],
)
def test_a_sparkline_is_means_of_parts_between_lowest_and_highest(values: list[float], width: int, line: str) -> None:
    assert sparkline(values, width) == line


def test_elsewhere_than_on_a_terminal_each_piece_of_news_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal, records = calm()
    run = write_run(tmp_path, "calm", journal.events, records)
    assert cli.main(["watch", run.url]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "attempt_started attempt=1 ranks=2 why=first start" in out
    assert out.splitlines()[-1] == "calm is completed at step 10"


def test_on_a_terminal_it_is_drawn_in_place_and_ends_with_the_run(tmp_path: Path) -> None:
    path = living(tmp_path)
    primary, secondary = pty.openpty()
    command = [sys.executable, "-m", "launch.cli", "watch", str(path), "--every", "0.1"]
    process = subprocess.Popen(command, stdout=secondary, stdin=subprocess.DEVNULL, env={**os.environ, "TERM": "xterm"})
    os.close(secondary)
    seen = b""
    try:
        seen = _read_until(primary, b"Ctrl-C leaves", 20.0)
        assert seen.startswith(b"\x1b[?1049h")
        event = Journal().at(30, "completed", step=12).events[0]
        add_events(cli_run(path), [type(event)(event.kind, event.t, 1, 99, event.fields)])
        seen += _read_until(primary, b"\x1b[?1049l", 10.0)
        assert process.wait(timeout=10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(primary)
    assert b"completed" in seen
    assert b"\x1b[?25h" in seen


def test_an_interval_out_of_range_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["watch", "x", "--every", "0"])
    assert end.value.code == 2
    assert "0.1 to 3600" in capsys.readouterr().err


def cli_run(path: Path) -> RunDirectory:
    return RunDirectory.locate(str(path))


def _read_until(descriptor: int, word: bytes, timeout_s: float) -> bytes:
    data, deadline = b"", time.monotonic() + timeout_s
    while word not in data:
        assert time.monotonic() < deadline, data
        try:
            data += os.read(descriptor, 65536)
        except OSError:  # the other end is closed
            break
    assert word in data, data
    return data
