"""Checkpoints measured beside the training, by a process on a spare slot: the same numbers, the same weights."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch import cli, evaluator
from launch.monitor.reader import RunReader
from launch.trained import Trained
from pretrain.checkpoint import list_checkpoints, read_weights
from pretrain.config import RunConfig
from pretrain.metrics.evaluations import evaluation_key, read_evaluations
from pretrain.metrics.history import read_attempts
from pretrain.rundir import RunDirectory
from tests.ranks import run_ranks
from tests.tiny import Tiny, build_tiny
from tests.train.rank_programs import trainings

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)
COMMON = ["schedule.kind=constant", "schedule.total_steps=12", "checkpoint.every_steps=3", "checkpoint.keep_last=20",
          "eval.every_steps=3", "eval.max_rows=6", "cluster.num_ranks=1", "cluster.standbys=off"]  # fmt: skip


def _start(home: Path, words: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PRETRAIN_HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "launch.cli", *words]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def _finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        out, err = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out + err


def _evaluators(home: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "launch.evaluator" in words and any(str(home) in word for word in words):
            found.append(process)
    return found


def _in_run(run: RunDirectory) -> dict[int, dict[str, Any]]:
    records = [record for records in read_attempts(run.store).values() for record in records]
    return {record["step"]: record["validation"]["text"] for record in records if "validation" in record}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def untouched(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run that nobody measures beside."""
    home = tmp_path_factory.mktemp("untouched")
    runs = [tiny.decoder("name=alone", *COMMON)]
    results = run_ranks(trainings, ranks=1, arguments={"runs": runs, "home": str(home)}, timeout_s=150)
    assert results[0].value == [0], results[0].output
    return RunDirectory.locate(str(home / "alone"))


def test_every_checkpoint_is_measured_on_a_spare_slot_also_the_last_and_the_training_does_not_notice(
    tiny: Tiny, tmp_path: Path, untouched: RunDirectory
) -> None:
    words = [*COMMON, "cluster.spare_ranks=1", "eval.checkpoints.average=1"]
    code, output = _finish(_start(tmp_path, ["train", *tiny.decoder("name=run", *words)]))
    assert code == 0, output
    run = RunDirectory.locate(str(tmp_path / "run"))
    found = {record["step"]: record for record in read_evaluations(run.store).values()}
    own = _in_run(run)
    assert found.keys() == own.keys() == {3, 6, 9, 12}
    for step, record in found.items():
        assert record["checkpoints"] == [record["checkpoint"]]
        measured = record["validation"]["text"]
        assert measured["target_tokens"] == own[step]["target_tokens"]
        assert measured["loss"] == pytest.approx(own[step]["loss"], rel=1e-5)
    assert "loss" in (tmp_path / "run" / "logs" / "evaluator.log").read_text()
    last = list_checkpoints(run.checkpoints)[0].name
    weights, alone = (read_weights(one.checkpoints, last) for one in (run, untouched))
    assert weights.keys() == alone.keys()
    assert [name for name in alone if not weights[name].equal(alone[name])] == []
    assert _evaluators(tmp_path) == []


@pytest.mark.slow
def test_the_death_of_the_process_that_measures_is_told_and_is_no_fault_of_the_run(tiny: Tiny, tmp_path: Path) -> None:
    words = [*COMMON, "cluster.spare_ranks=1", "eval.checkpoints.average=1"]
    process = _start(tmp_path, ["train", *tiny.decoder("name=run", *words)])
    deadline, killed = time.monotonic() + 240.0, None
    while process.poll() is None and killed is None and time.monotonic() < deadline:
        if _evaluators(tmp_path):
            killed = _evaluators(tmp_path)[0]
            assert killed.nice() >= 0
            killed.send_signal(signal.SIGKILL)  # whoever measures may die at any time
        time.sleep(0.05)
    code, output = _finish(process)
    assert code == 0, output
    assert killed is not None
    run = RunDirectory.locate(str(tmp_path / "run"))
    assert "the process that measures checkpoints" in output
    assert not any(event.kind == "fault" for event in run.events())
    assert [event.fields["ranks"] for event in run.events() if event.kind == "attempt_started"] == [1]
    assert _evaluators(tmp_path) == []


def test_following_a_run_that_has_ended_measures_means_of_its_checkpoints_once(
    untouched: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(untouched.url, tmp_path / "alone")
    run = RunDirectory.locate(str(tmp_path / "alone"))
    assert cli.main(["evaluate", run.url, "--follow", "--average", "2"]) == 0
    told = capsys.readouterr().out
    names = {info.step: info.name for info in list_checkpoints(run.checkpoints)}
    assert [line.split()[0] for line in told.splitlines()] == [names[12], names[9], names[6], names[3]]  # newest first
    record = json.loads(run.store.get(evaluation_key(names[9], 2)))
    assert record["checkpoints"] == [names[9], names[6]]
    assert json.loads(run.store.get(evaluation_key(names[3], 2)))["checkpoints"] == [names[3]]
    reader = RunReader(run)  # of the dashboard
    reader.refresh()
    shown = {(point.step, point.values["loss"]) for point in reader.validations if point.source == "text (mean of 2)"}
    assert (9, record["validation"]["text (mean of 2)"]["loss"]) in shown
    # The same mean by another way: exported by the average command, and measured as any exported model is.
    kept = [name for name in names.values() if name not in (names[9], names[6])]
    for name in kept:
        shutil.rmtree(tmp_path / "alone" / "checkpoints" / name)
    assert cli.main(["evaluate", run.url, "--average", "2", "--json"]) == 0
    direct = json.loads(capsys.readouterr().out)["validation"]["text"]
    assert record["validation"]["text (mean of 2)"]["loss"] == pytest.approx(direct["loss"], rel=1e-7)
    assert cli.main(["evaluate", run.url, "--follow", "--average", "2"]) == 0
    assert capsys.readouterr().out == ""  # nothing is measured twice


def test_a_damaged_checkpoint_is_named_and_the_others_are_measured(
    untouched: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(untouched.url, tmp_path / "alone")
    run = RunDirectory.locate(str(tmp_path / "alone"))
    bad = next(info.name for info in list_checkpoints(run.checkpoints) if info.step == 6)
    (largest,) = sorted((tmp_path / "alone" / "checkpoints" / bad).rglob("*"), key=lambda p: p.stat().st_size)[-1:]
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    assert cli.main(["evaluate", run.url, "--follow"]) != 0
    said = capsys.readouterr()
    assert f"{bad} cannot be measured" in said.out
    assert bad in said.err
    assert {record["step"] for record in read_evaluations(run.store).values()} == {3, 9, 12}


def test_a_checkpoint_is_not_damaged_because_one_of_its_mean_was_deleted_meanwhile(
    untouched: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(untouched.url, tmp_path / "alone")
    run = RunDirectory.locate(str(tmp_path / "alone"))
    names = {info.step: info.name for info in list_checkpoints(run.checkpoints)}
    opened = evaluator.open_checkpoints

    def open_late(directory: RunDirectory, config: RunConfig, of: list[str]) -> Trained:
        shutil.rmtree(tmp_path / "alone" / "checkpoints" / names[9], ignore_errors=True)  # as retention does
        return opened(directory, config, of)

    monkeypatch.setattr(evaluator, "open_checkpoints", open_late)
    assert cli.main(["evaluate", run.url, "--follow", "--average", "2"]) == 0
    assert "cannot be measured" not in capsys.readouterr().out
    found = {record["step"]: record["checkpoints"] for record in read_evaluations(run.store).values()}
    assert found == {12: [names[12], names[6]], 6: [names[6], names[3]], 3: [names[3]]}


def test_what_does_not_go_together_is_refused(untouched: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate", untouched.url, "--follow", "--pairs", "x.jsonl"]) == 2
    assert "--pairs does not go with --follow" in capsys.readouterr().err
    assert cli.main(["evaluate", untouched.url, "--follow", "--average", "-1"]) == 2
    assert "--average=-1 is a mean of nothing" in capsys.readouterr().err
