"""`list`, `status`, `logs`, `stop`, `doctor` and the dispatcher, on run directories made by hand: no Ray."""

from __future__ import annotations

import importlib.metadata
import json
import time
from pathlib import Path

import pytest

from launch import doctor
from launch.cli import main
from launch.clusters import local
from launch.controller.attempt import assign_ranks, choose_nodes
from pretrain.errors import StoreError
from pretrain.rundir import EventKind, Lease, RunDirectory, this_process
from tests.launch.runs import config_for, write_config


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRETRAIN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def make_run(folder: Path, home: Path, name: str) -> tuple[RunDirectory, Lease]:
    """A run in the middle of its first attempt."""
    run, _ = RunDirectory.claim(config_for(folder, name, fake={"steps": 100}), resume="never", home=str(home))
    lease = Lease.acquire(run.store, purpose="test")
    journal = run.journal(lease)
    journal.append(EventKind.CREATED)
    journal.append(EventKind.ATTEMPT_STARTED, attempt=1, ranks=1, host="h", why="first start")
    record = {"t": time.time(), "step": 7, "loss": 3.25, "tokens_per_second": 5200.0}
    run.store.put(run.metrics_key(1), json.dumps(record).encode() + b"\n")
    run.store.put(run.log_key(1, 0), b"first line\n")
    return run, lease


def test_list_and_status_show_state_step_and_loss(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, lease = make_run(tmp_path, home, "one")
    with lease:
        assert main(["list"]) == 0
        table = capsys.readouterr().out
        assert main(["list", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert main(["status", "one"]) == 0
        status = capsys.readouterr().out
    assert table.split()[:4] == ["name", "state", "step", "loss"]
    assert "one" in table
    assert "7/100" in table
    assert rows[0]["state"] == "running"
    assert rows[0]["step"] == 7
    assert "3.2500" in status
    assert "5.2k tokens/s" in status


def test_an_unknown_run_is_a_user_error_that_lists_near_names(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, home, "quickstart")[1].release()
    assert main(["status", "quikstart"]) == 2
    assert "quickstart" in capsys.readouterr().err


def test_logs_follow_prints_what_comes_later_and_ends_with_the_run(
    tmp_path: Path, home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, lease = make_run(tmp_path, home, "one")

    def go_on() -> None:
        run.store.append(run.log_key(1, 0), b"second line\n")
        run.store.put(run.log_key(2, 0), b"of attempt two\n")
        run.journal(lease).append(EventKind.COMPLETED, step=100)

    later, sleep = iter([go_on]), time.sleep

    def rest(seconds: float) -> None:
        next(later, lambda: None)()  # after the first look
        sleep(seconds)

    monkeypatch.setattr("launch.logs.time.sleep", rest)
    assert main(["logs", "one", "-f"]) == 0
    lease.release()
    assert capfd.readouterr().out == "r0 | first line\nr0 | second line\n--- attempt 2 ---\nr0 | of attempt two\n"


def test_logs_of_all_ranks_name_the_rank_and_print_each_line_once_and_one_rank_comes_as_it_is(
    tmp_path: Path, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, lease = make_run(tmp_path, home, "one")
    run.store.put(run.log_key(1, 1), b"same line\nsame line\nnot finished")
    run.store.put(run.log_key(1, 0), b"same line\n")
    lease.release()
    assert main(["logs", "one"]) == 0
    assert capfd.readouterr().out == "r0 | same line\nr1 | same line\nr1 | same line\nr1 | not finished\n"
    assert main(["logs", "one", "--rank", "1"]) == 0
    assert capfd.readouterr().out == "same line\nsame line\nnot finished"


def test_logs_on_a_terminal_colour_ranks_unless_no_color_is_set(
    tmp_path: Path, home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, home, "one")[1].release()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["logs", "one"]) == 0
    assert capfd.readouterr().out == "\x1b[36mr0 | \x1b[0mfirst line\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["logs", "one"]) == 0
    assert capfd.readouterr().out == "r0 | first line\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["logs", "one", "--attempt", "0"], "--attempt=0 is wrong. The first attempt is 1"),
        (["logs", "one", "--rank", "-1"], "--rank=-1 is wrong. The first rank is 0"),
        (["logs", "one", "--attempt", "7"], "no log of any rank in attempt 7"),
        (["resume", "one", "name=two"], "name=two cannot be changed"),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    make_run(tmp_path, home, "one")[1].release()
    assert main(words) == 2
    assert text in capsys.readouterr().err


def test_the_word_none_is_no_name_of_a_run(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that has no name to give writes None; no directory is called so."""
    config = write_config(tmp_path, "run", fake={"steps": 1})
    for name in ("None", ""):
        assert main(["train", str(config), "--dry-run", "--name", name]) == 2
        assert "name=" in capsys.readouterr().err
    assert not list(home.glob("*"))


def test_a_home_that_is_a_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["list", "--home", str(tmp_path / "file")]) == 2
    assert f"--home={tmp_path}/file is a file" in capsys.readouterr().err


def test_logs_of_a_rank_that_never_was_is_a_user_error(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, home, "one")[1].release()
    assert main(["logs", "one", "--rank", "5"]) == 2
    assert "no log of rank 5" in capsys.readouterr().err


def test_stop_writes_a_request_and_waits_for_the_end(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, lease = make_run(tmp_path, home, "one")
    assert main(["stop", "one", "--timeout", "0.5"]) == 3  # nobody listens
    assert [request.now for request in run.pending_requests()] == [False]
    run.journal(lease).append(EventKind.STOPPED, step=7)
    lease.release()
    assert main(["stop", "one"]) == 0
    assert "not running: it is stopped" in capsys.readouterr().out


def test_every_problem_of_a_config_is_told_before_anything_starts(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, "bad", fake={"steps": 5})
    code = main(["train", str(config), "optimizer.lerning_rate=1", "batch.global_batch_size=7"])
    message = capsys.readouterr().err
    assert code == 2
    assert "learning_rate" in message
    assert "batch.global_batch_size=7" in message
    assert not home.exists()


def test_an_error_of_the_family_becomes_one_line_and_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise StoreError("disk full")

    monkeypatch.setattr(doctor, "run_doctor", fail)
    assert main(["doctor"]) == 3
    assert capsys.readouterr().err == "error: disk full\n"


def test_doctor_finds_a_missing_package(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["torch", "no-such-package"])
    assert main(["doctor", "--json"]) == 3
    findings = {row["check"]: row for row in json.loads(capsys.readouterr().out)}
    assert findings["torch"]["verdict"] == "ok"
    assert findings["no-such-package"]["verdict"] == "bad"


def test_doctor_removes_the_folder_of_a_dead_run_and_leaves_that_of_a_living_one(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "_base", lambda: tmp_path)
    living, dead = local._make_folder(), local._make_folder()
    owner = this_process()
    (dead / "owner.json").write_text(json.dumps({**owner.to_json(), "start_time": owner.start_time - 1}))
    main(["doctor", "--json"])
    findings = {row["check"]: row for row in json.loads(capsys.readouterr().out)}
    assert str(dead) in findings["leftovers"]["found"]
    assert (living.exists(), dead.exists()) == (True, False)


def test_ranks_of_a_node_are_consecutive_and_the_fullest_nodes_come_first() -> None:
    assert choose_nodes({"a": 2, "b": 8, "c": 4, "d": 0}, 11) == {"b": 8, "c": 3}
    places = assign_ranks({7: 2, 9: 4}, 5)
    assert [(place.rank, place.agent, place.local_rank, place.ranks_per_node) for place in places] == [
        (0, 7, 0, 2),
        (1, 7, 1, 2),
        (2, 9, 0, 3),
        (3, 9, 1, 3),
        (4, 9, 2, 3),
    ]
    with pytest.raises(ValueError, match="6 slots for 7 ranks"):
        assign_ranks({7: 2, 9: 4}, 7)
