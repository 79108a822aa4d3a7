"""`pretrain watch`: the picture, the lines elsewhere, and a real pseudo-terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch import cli
from launch.monitor.facts import run_facts
from launch.monitor.reader import RunReader
from launch.monitor.terminal import render
from launch.monitor.watch_app import WatchApp
from launch.monitor.watch_history import timeline_lines
from launch.monitor.watch_panels import kept_values, sparkline
from pretrain.errors import StoreError
from pretrain.rundir import RunDirectory, this_process
from tests.monitor.journals import Journal, step, validation
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
    lines = render(reader, 80, time.time())
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in text
    assert lines[0].startswith("torn  ● running")
    for fact in (
        "12/",
        "1m15s left",
        "loss       2.5000",
        "100 tokens/s",
        "goodput",
        "from step",
        "failed: application",
    ):
        assert fact in text, fact
    assert "rank 1 was killed" in text
    assert "second line" not in text
    assert "step-00000010-a001" in text


def test_the_timeline_has_a_mark_for_each_attempt_fault_and_rollback_where_it_happened(tmp_path: Path) -> None:
    journal = Journal().at(0, "created").at(0, "attempt_started", attempt=1, ranks=1, host="here", why="first start")
    journal.at(40, "rolled_back", attempt=1, step=5, to_step=2, rows=[1, 2], why="a spike")
    journal.at(50, "fault", attempt=1, cause="node", message="gone").at(50.1, "attempt_started", attempt=2, ranks=1)
    journal.at(60, "restored", attempt=2, step=2).at(90, "committed", attempt=2, step=9, checkpoint="c")
    journal.at(100, "completed", step=10)
    records = {1: [step(50, 50, 1.0)], 2: [step(100, 40, 1.0)]}
    reader = RunReader(write_run(tmp_path, "marked", journal.events, records))
    reader.refresh()
    marks, bar, saved, ends, *_ = timeline_lines(run_facts(reader), 100, 1100.0)
    assert {at: mark for at, mark in enumerate(marks) if mark != " "} == {0: "1", 40: "↶", 50: "✗", 51: "2"}
    assert re.fullmatch("█{2}x{48}r{12}█{38}", bar), bar  # kept up to step 2; from there 38 steps to the end
    assert (saved.index("▴"), len(saved)) == (90, 91)
    assert [ends.split()[0][-2:], ends.split()[1][-2:]] == ["40", "20"]  # 1000 and 1100 s are so many behind a minute


def test_the_terminal_shows_every_fact_of_the_page(tmp_path: Path) -> None:
    """What the page's tiles and tables are made of, from a record with all tables."""
    record = {
        **step(9, 8, 1.0), "tokens": 123_456, "mfu": 0.41, "hfu": 0.52, "peak_flops": 2e12, "forward_s": 0.31,
        "backward_s": 0.42, "optimizer_s": 0.13, "host_bytes": 4e9, "allocated_bytes": 7e9, "reserved_bytes": 8e9,
        "gradient_norm": 1.25, "learning_rate": 3e-4, "skipped_steps": 2, "rollbacks": 1, "masked_rows": 3,
        "balance_loss": 2.125, "router_z_loss": 0.75, "largest_expert_share": 0.375, "idle_experts": 3,
        "straggling": 1.5, "memory_copy_step": 7, "warnings": ["decoder.1 head 2 is near uniform (entropy 0.997)"],
        "sources": {"prose": {"loss": 2.25, "share": 0.75, "planned_share": 0.8, "epochs": 0.5}},
        "objectives": {"span": {"loss": 3.125}},
        "layers": {"layers.0": {"parameter_norm": 11.5, "update_norm": 0.0125, "activation_rms": 1.75}},
        "attention": {"decoder.1": {"entropy_fraction": 0.875, "lowest_entropy_fraction": 0.5,
                                    "highest_entropy_fraction": 0.997, "largest_score": 17.5, "top_share": 0.625}},
        "ranks": {"own_s": [0.3, 0.3, 0.9]},
    }  # fmt: skip
    journal = Journal().at(0, "created").at(0, "attempt_started", attempt=1, ranks=3, host="here", why="first start")
    saved = {"checkpoint": "step-00000005-a001", "bytes": 12_300_000, "stall_s": 0.25, "write_s": 1.5}
    journal.at(8, "committed", attempt=1, step=5, **saved)
    run = write_run(tmp_path, "all", journal.events, {1: [record, validation(9.5, 8, 0.25)]}, holder=this_process())
    run.store.put("samples/prompts-00000008.jsonl", b'{"prompt": "the cat", "text": "sat on\\nthe mat"}\n')
    reader = RunReader(run)
    reader.refresh()
    text = re.sub(" +", " ", "\n".join(render(reader, 160, time.time())))
    for fact in (
        "123k seen", "text at step 8: loss 2.5", "gradient norm 1.25", "rate 0.0003",
        "time 1.00s: data wait 0.00s, forward 0.31s, backward 0.42s, optimizer 0.13s",
        "MFU 41.0 %, HFU 52.0 % of 2 TFLOP/s a rank",
        "experts fullest 37.5 %, without a token 3", "routers balance loss 2.125, z loss 0.75",
        "memory host 4.0GB, allocated 7.0GB, reserved 8.0GB",
        "skipped steps 2, rollbacks 1, rows masked in the last step 3",
        "warning decoder.1 head 2 is near uniform", "prose 75.0 % 80.0 % 0.5 2.25", "span 3.125",
        "decoder.1 87.5 % 50.0 % 99.7 % 17.5 62.5 %", "layers.0 11.5 0.0125 1.75", "rank 2 (x 3, 0.90s a step)",
        "newest copy in memory: step 7", "12MB durable 0.25s 1.50s", "saved step-00000005-a001", "validation 0.25s",
        "step 8, prompts", "prompt the cat", "text sat on the mat", "goodput",
    ):  # fmt: skip
        assert fact in text, (fact, text)
    # Nothing of the page's tables is without a panel.
    assert {"sources", "objectives", "layers", "attention"} == run_facts(reader)["tables"].keys()


def test_curves_show_only_the_line_that_counts(tmp_path: Path) -> None:
    reader = RunReader(cli_run(living(tmp_path)))
    reader.refresh()
    assert kept_values(reader, "loss") == [3.0, 2.5]


def test_curves_leave_out_a_spike_that_the_same_attempt_went_back_from(tmp_path: Path) -> None:
    journal = Journal().at(0, "created").at(0, "attempt_started", attempt=1, ranks=1, host="here", why="first start")
    losses = [(1, 5.0), (2, 4.0), (3, 70.0), (2, 4.1), (3, 3.0)]  # back from step 3 to step 1
    rows = [{**step(10.0 + at, number, 1.0), "loss": loss} for at, (number, loss) in enumerate(losses)]
    reader = RunReader(write_run(tmp_path, "spiked", journal.events, {1: rows}))
    reader.refresh()
    assert kept_values(reader, "loss") == [5.0, 4.1, 3.0]


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
    terminal = {"stdin": secondary, "stdout": secondary, "stderr": secondary}
    process = subprocess.Popen(command, **terminal, env={**os.environ, "TERM": "xterm"}, start_new_session=True)
    os.close(secondary)
    seen = b""
    try:
        seen = _read_until(primary, b"leave; the run goes on", 20.0)
        assert b"\x1b[?1049h" in seen
        event = Journal().at(30, "completed", step=12).events[0]
        add_events(cli_run(path), [type(event)(event.kind, event.t, 1, 99, event.fields)])
        seen += _read_until(primary, b"\x1b[?1049l", 10.0)
        seen += _read_until(primary, b"completed", 10.0)  # the last picture stays below
        assert process.wait(timeout=10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(primary)
    assert b"\x1b[?25h" in seen


def test_the_app_scrolls_turns_light_and_is_left_by_a_key(tmp_path: Path) -> None:
    async def look() -> None:
        reader = RunReader(cli_run(living(tmp_path)))
        app = WatchApp(reader, 0.1)
        async with app.run_test(size=(100, 16)) as pilot:
            for _ in range(200):
                await pilot.pause(0.02)
                if app.shown:
                    break
            page = app.query_one("#run-page")
            assert [panel.title for panel in app.shown["run"]][:3] == ["", "curves", "a step"]
            assert page.scroll_y == 0
            await pilot.press("G")
            assert page.scroll_y == page.max_scroll_y > 0
            await pilot.press("g", "j")
            assert page.scroll_y == 1
            await pilot.press("t")
            assert app.theme == "textual-light"
            picture = app.export_screenshot()
            assert "torn" in picture
            assert "running" in picture
            await pilot.press("q")
        assert app.return_code == 0

    asyncio.run(look())


def test_storage_that_is_out_of_reach_for_a_moment_leaves_the_app_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look() -> None:
        reader = RunReader(cli_run(living(tmp_path)))
        app = WatchApp(reader, 0.1)
        async with app.run_test(size=(100, 40)) as pilot:
            await _until(pilot, lambda: bool(app.shown))
            told: list[str] = []
            monkeypatch.setattr(app, "notify", lambda text, **more: told.append(text))
            with monkeypatch.context() as broken:
                broken.setattr("launch.monitor.watch_app.run_facts", _out_of_reach)
                await _until(pilot, lambda: bool(told))
            assert told[0] == "bucket is out of reach"
            assert app.shown["run"][0].lines[0].startswith("torn")
            before = app.shown
            await _until(pilot, lambda: app.shown is not before)
            await pilot.press("q")

    asyncio.run(look())


async def _until(pilot: Any, seen: Callable[[], bool]) -> None:
    for _ in range(400):
        await pilot.pause(0.02)
        if seen():
            return
    pytest.fail("not within 8 seconds")


def _out_of_reach(reader: RunReader) -> None:
    raise StoreError("bucket is out of reach")


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
