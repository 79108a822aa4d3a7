"""`pretrain report` on a run directory whose every second is known."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from launch import cli
from launch.monitor.facts import run_facts
from launch.monitor.reader import RunReader
from launch.monitor.report import exact_seconds, format_bar
from launch.monitor.watch_history import history_panels
from tests.monitor.journals import Journal, step
from tests.monitor.runs import write_run
from tests.monitor.test_ledger import calm


@pytest.fixture
def torn(tmp_path: Path) -> Path:
    """A run of 20 steps that was killed at 15 and went on from 10."""
    journal = Journal().at(0, "created").at(0, "attempt_started", attempt=1, ranks=2, why="first start")
    journal.at(12, "committed", attempt=1, step=10, checkpoint="step-00000010-a001")
    journal.at(20, "fault", attempt=1, cause="application", rank=1, exit_code=-9, message="rank 1 was killed")
    journal.at(20, "attempt_ended", attempt=1, outcome="failed")
    journal.at(21, "attempt_started", attempt=2, ranks=2, why="rank 1 was killed").at(
        22, "restored", attempt=2, step=10
    )
    journal.at(33, "attempt_ended", attempt=2, outcome="completed").at(33, "completed", step=20)
    records = {1: [step(12, 10, 1.0), step(17, 15, 1.0)], 2: [step(33, 20, 1.0)]}
    write_run(tmp_path, "torn", journal.events, records)
    return tmp_path / "torn"


def test_json_holds_the_ledger_the_attempts_and_the_checkpoints(torn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(torn), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ledger"]["wall_s"] == 33.0
    assert sum(report["ledger"]["seconds"].values()) == pytest.approx(33.0)
    assert report["ledger"]["seconds"]["training"] == 20.0
    assert report["ledger"]["seconds"]["rework"] == 8.0
    assert report["ledger"]["restarts"][0]["cause"] == "application"
    assert [attempt["kept_step"] for attempt in report["attempts"]] == [10, None]
    assert [checkpoint["step"] for checkpoint in report["checkpoints"]] == [10]
    assert report["run"]["state"] == "completed"


def test_text_says_where_the_time_went_and_what_restarts_cost(torn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(torn)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["where", "33s", "went"] in lines
    assert [line[1:4] for line in lines if line[:1] == ["training"]] == [["20.0s", "60.6", "%"]]
    assert ["application", "1", "11.0s", "11.0s"] in lines
    assert ["1", "2", "0", "15", "10", "20.0s", "failed"] in lines


def test_what_a_resume_changed_in_the_config_is_told_with_its_attempt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal().at(0, "created").at(1, "attempt_started", attempt=1, ranks=1).at(9, "stopped", step=5)
    journal.lease = 2
    changes = ["schedule.total_steps: 5 -> 9 (applies from the next step on)", "seed: 1 -> 2 (recorded)"]
    journal.at(20, "config_changed", changes=changes[:1]).at(21, "config_changed", changes=changes[1:])
    journal.at(22, "attempt_started", attempt=2, ranks=1).at(23, "fault", attempt=2, cause="node")
    journal.at(24, "attempt_started", attempt=3, ranks=1).at(30, "completed", step=9)
    write_run(tmp_path, "changed", journal.events, {})
    assert cli.main(["report", str(tmp_path / "changed"), "--json"]) == 0
    attempts = json.loads(capsys.readouterr().out)["attempts"]
    assert [attempt["changes"] for attempt in attempts] == [[], changes, []]
    assert cli.main(["report", str(tmp_path / "changed")]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if "->" in line] == [
        f"  attempt 2: {change}" for change in changes
    ]


def test_a_thousand_checkpoints_leave_an_early_fault_in_sight(tmp_path: Path) -> None:
    journal = Journal().at(0, "created").at(1, "attempt_started", attempt=1, ranks=1)
    journal.at(2, "fault", attempt=1, cause="node", message="early").at(3, "attempt_started", attempt=2, ranks=1)
    for step_done in range(1, 1001):
        journal.at(3 + step_done, "committed", attempt=2, step=step_done, checkpoint=f"step-{step_done:08d}-a002")
    for place in range(300):
        journal.at(1100 + place, "straggler", attempt=2, rank=0, host="here", median_s=2.0, others_median_s=1.0)
    journal.at(1500, "committed", attempt=2, step=1001, checkpoint="step-00001001-a002")
    reader = RunReader(write_run(tmp_path, "long", journal.events, {}))
    reader.refresh()
    facts = run_facts(reader)
    fault, saves, *stragglers, last = facts["events"]
    assert (fault["kind"], fault["t"]) == ("fault", 1002.0)
    assert (saves["count"], saves["first"], saves["checkpoint"]) == (1000, "step-00000001-a002", "step-00001000-a002")
    assert [event["t"] for event in stragglers] == [2100.0 + place for place in range(100, 300)]
    assert (last["checkpoint"], "count" in last) == ("step-00001001-a002", False)
    told = "\n".join(line for panel in history_panels(facts, 120, 2600.0, most_rows=400) for line in panel.lines)
    assert "saved 1000 checkpoints, step-00000001-a002 to step-00001000-a002" in told
    assert "saved step-00001001-a002" in told


def test_a_name_that_is_none_is_a_user_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path / "nothing")]) == 2
    assert "is not a run" in capsys.readouterr().err


def test_a_flipped_bit_in_the_journal_is_named(torn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = torn / "journal" / "000001" / "00000003.json"
    path.write_bytes(path.read_bytes().replace(b'"step": 10', b'"step": 11'))
    assert cli.main(["report", str(torn)]) != 0
    assert "00000003.json is damaged" in capsys.readouterr().err


def test_the_reader_reads_each_byte_once_and_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    journal, records = calm()
    run = write_run(tmp_path, "calm", journal.events, records)
    reader = RunReader(run)
    reader.refresh()
    assert list(reader.columns[1].fields["step"]) == [5, 10]
    path = tmp_path / "calm" / run.metrics_key(1)
    line = json.dumps({**step(30, 15, 1.0), "mfu": 0.5}).encode() + b"\n"
    with path.open("ab") as file:
        file.write(line[:20])
        file.flush()
        reader.refresh()
        assert reader.columns[1].length == 2
        file.write(line[20:])
    reader.refresh()
    assert list(reader.columns[1].fields["step"]) == [5, 10, 15]
    assert reader.last_value("mfu") == 0.5
    assert len(reader.columns[1].fields["mfu"]) == 3
    assert (reader.validations[0].step, reader.validations[0].values["loss"]) == (5, 2.5)
    before = reader.version
    reader.refresh()
    assert reader.version == before


def test_a_metrics_file_that_became_shorter_is_read_anew(tmp_path: Path) -> None:
    journal, records = calm()
    run = write_run(tmp_path, "calm", journal.events, records)
    reader = RunReader(run)
    reader.refresh()
    run.store.put(run.metrics_key(1), json.dumps(step(15, 3, 1.0)).encode() + b"\n")
    reader.refresh()
    reader.refresh()
    assert list(reader.columns[1].fields["step"]) == [3]


@pytest.mark.parametrize(("seconds", "text"), [(0.123, "0.12s"), (12.34, "12.3s"), (90, "1m30s")])
def test_seconds_have_as_many_digits_as_help(seconds: float, text: str) -> None:
    assert exact_seconds(seconds) == text


def test_a_bar_has_eighths() -> None:
    assert (format_bar(0.0, 4), format_bar(0.5, 4), format_bar(1 / 32, 4), format_bar(1.0, 4)) == (
        "",
        "██",
        "▏",
        "████",
    )


def test_what_costs_much_is_made_anew_seldom_but_an_event_is_seen_at_once(tmp_path: Path) -> None:
    journal, records = calm()
    run = write_run(tmp_path, "calm", journal.events, records)
    reader = RunReader(run)
    reader.refresh()
    made: list[int] = []

    def slow() -> int:
        time.sleep(0.05)
        made.append(len(made))
        return made[-1]

    def ask(*, grows: bool = False) -> int:
        return int(reader._kept("slow", slow, grows=grows))

    assert (ask(), ask()) == (0, 0)
    reader.version += 1
    assert ask() == 0  # 0.5 s have not passed
    reader.events = reader.events[:-1]
    assert (ask(), ask()) == (1, 1)
    assert ask(grows=True) == 2  # the run came to life
    reader.version += 1
    time.sleep(0.55)
    assert ask(grows=True) == 3
