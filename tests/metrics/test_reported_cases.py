"""What others' metrics and trackers got wrong, each tried on real tiny runs (cases M01, M03, M04, M06, M08)."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch import cli
from pretrain.faults import VARIABLE
from tests.metrics.wandb_files import offline_files, read_artifacts, read_history
from tests.ranks_pool import Group, RankPool
from tests.tiny import Tiny, build_tiny

OFFLINE = "metrics.wandb.mode=offline"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build_tiny(tmp_path_factory.mktemp("tiny"))


class Runs:
    """Runs under one home, started from the pool."""

    def __init__(self, pool: RankPool, tiny: Tiny, home: Path) -> None:
        self.pool, self.tiny, self.home = pool, tiny, home

    def start(
        self, name: str, *more: str, ranks: int = 1, faults: Sequence[dict[str, Any]] = (), prelude: str = "",
        environment: dict[str, str] | None = None,
    ) -> Group:  # fmt: skip
        plan = self.home / f"{name}.faults"
        plan.write_text(json.dumps(list(faults)))
        words = self.tiny.decoder(f"name={name}", *more, "--resume", "auto")
        logs = [self.home / f"{name}-{rank}.log" for rank in range(ranks)]
        variables = {"PRETRAIN_HOME": str(self.home), VARIABLE: str(plan), **(environment or {})}
        return self.pool.start(words, ranks=ranks, environment=variables, logs=logs, prelude=prelude)

    def finish(self, name: str, *more: str, **options: Any) -> Group:
        group = self.start(name, *more, **options)
        assert group.wait(90.0), group.output()
        assert set(group.codes.values()) == {0}, group.output()
        return group

    def records(self, name: str, attempt: int) -> list[dict[str, Any]]:
        path = self.home / name / "metrics" / f"attempt-{attempt:03d}.jsonl"
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return [record for record in map(json.loads, lines) if "loss" in record]

    def steps(self, name: str, attempt: int) -> list[int]:
        return [record["step"] for record in self.records(name, attempt)]


@pytest.fixture
def runs(rank_pool: RankPool, tiny: Tiny, tmp_path: Path) -> Runs:
    return Runs(rank_pool, tiny, tmp_path)


def test_steps_that_a_resume_does_again_are_in_both_records_as_a_second_attempt(runs: Runs) -> None:
    """M01: saved at 5, killed at 8, resumed: 6 to 8 are there twice, marked, in our lines and in wandb's file."""
    words = ("checkpoint.every_steps=5", "schedule.total_steps=10", OFFLINE)
    killed = runs.start("torn", *words, faults=[{"point": "step.logged", "do": "kill", "nth": 8}])
    assert killed.wait(90.0), killed.output()
    assert killed.codes == {0: -signal.SIGKILL}
    runs.finish("torn", *words)
    assert (runs.steps("torn", 1), runs.steps("torn", 2)) == ([*range(1, 9)], [*range(6, 11)])
    _, rows, axes = read_history(offline_files(runs.home / "torn")[-1])
    points = [(row["attempt"], row["step"], row["loss"]) for row in rows if "loss" in row]
    assert points == [
        (attempt, record["step"], pytest.approx(record["loss"]))
        for attempt in (1, 2)
        for record in runs.records("torn", attempt)
    ]
    assert [row["_step"] for row in rows] == [*range(len(rows))]
    assert axes["*"] == "step"


def test_two_ranks_make_one_wandb_run_and_the_export_command_adds_its_artifact_to_it(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """M04, and `pretrain checkpoint export` where artifacts of exports are wanted."""
    words = ("schedule.total_steps=4", OFFLINE, "metrics.wandb.artifacts=[export]")
    runs.finish("two", *words, ranks=2)
    (file,) = offline_files(runs.home / "two")
    assert [path.name for path in (runs.home / "two" / "wandb").glob("offline-run-*")] == [file.parent.name]
    run_id, rows, _ = read_history(file)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]
    assert read_artifacts(file) == []

    time.sleep(1.1)  # wandb names its directories by the second
    monkeypatch.setenv("PRETRAIN_HOME", str(runs.home))
    out = runs.home / "exported"
    assert cli.main(["checkpoint", "export", "two", "--out", str(out), "--dtype", "bfloat16"]) == 0
    assert "WARNING" not in capsys.readouterr().err
    first, second = offline_files(runs.home / "two")
    assert first == file
    assert read_history(second)[0] == run_id
    ((name, kind, told, _, files),) = read_artifacts(second)
    assert (name, kind) == ("two-model", "model")
    assert told == {"run": "two", "checkpoint": "step-00000004-a001", "dtype": "bfloat16"}
    assert sorted(files) == sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert files["model.safetensors"].read_bytes() == (out / "model.safetensors").read_bytes()


def test_without_a_network_training_goes_on_with_one_warning(runs: Runs) -> None:
    """M03: nobody listens where the wandb server should be."""
    nowhere = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
    group = runs.finish("alone", "schedule.total_steps=6", "metrics.wandb.mode=online",
                        prelude="tests.metrics.impatient:install", environment=nowhere)  # fmt: skip
    _went_on(runs, group, "alone", 1, 6, "wandb is offline for this attempt")
    (file,) = offline_files(runs.home / "alone")
    assert [row["step"] for row in read_history(file)[1] if "loss" in row] == [*range(1, 7)]


def test_a_tracker_that_is_killed_leaves_training_and_its_records_alone(runs: Runs) -> None:
    """M03: wandb's process is killed in the middle of a run."""
    group = runs.start("orphan", "schedule.total_steps=100000", OFFLINE)
    try:
        deadline = time.monotonic() + 90
        while not (cores := _wandb_processes(group.pids[0])) or not offline_files(runs.home / "orphan"):
            assert not group.codes, group.output()
            assert time.monotonic() < deadline, group.output()
            time.sleep(0.1)
        for core in cores:
            core.kill()
        killed_at = len(runs.steps("orphan", 1))
        while len(runs.steps("orphan", 1)) < killed_at + 20:
            assert not group.codes, group.output()
            time.sleep(0.1)
        os.kill(group.pids[0], signal.SIGTERM)
        assert group.wait(60.0), group.output()
    finally:
        group.kill()
    assert group.codes == {0: 5}, group.output()
    _went_on(runs, group, "orphan", 1, len(runs.steps("orphan", 1)), "wandb is off for the rest of this attempt")


def test_a_folder_that_the_tracker_cannot_write_to_leaves_training_and_its_records_alone(runs: Runs) -> None:
    """M03: something else lies where wandb's files would be; the tests' user may write to any folder."""
    runs.finish("blocked", "schedule.total_steps=2")
    (runs.home / "blocked" / "wandb").write_text("no folder")
    group = runs.finish("blocked", "schedule.total_steps=6", OFFLINE)
    _went_on(runs, group, "blocked", 2, 4, "wandb is o")
    assert (runs.home / "blocked" / "wandb").read_text() == "no folder"


def _went_on(runs: Runs, group: Group, name: str, attempt: int, steps: int, words: str) -> None:
    """All steps are recorded, one warning is given and that is about wandb."""
    found = runs.steps(name, attempt)
    assert found == [*range(found[0], found[0] + steps)]
    warnings = re.findall("WARNING.*", group.output())
    assert len(warnings) == 1, warnings
    assert words in warnings[0]


def _wandb_processes(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children(recursive=True) if "wandb" in child.name()]


def test_speed_after_a_resume_is_that_of_the_steps_and_tokens_go_on(runs: Runs) -> None:
    """M06: stopped at 50 by SIGTERM, resumed to 80; speeds against the records' own times."""
    asked = [{"point": "step.logged", "do": "sleep:2", "nth": 50}]
    words = ("schedule.total_steps=80", "checkpoint.every_steps=100")
    group = runs.start("stopped", *words, faults=asked)
    deadline = time.monotonic() + 90
    while not (runs.home / "stopped.faults.fired-0").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(group.pids[0], signal.SIGTERM)
    assert group.wait(60.0), group.output()
    assert group.codes == {0: 5}, group.output()
    runs.finish("stopped", *words)
    first, second = runs.records("stopped", 1), runs.records("stopped", 2)
    assert second[0]["step"] == first[-1]["step"] + 1
    assert second[-1]["step"] == 80
    assert 50 <= first[-1]["step"] <= 51
    whole = first + second
    for before, after in itertools.pairwise(whole):
        assert after["tokens"] == before["tokens"] + after["target_tokens"]
    for records in (first[:50], second):
        told = statistics.median(record["tokens_per_second"] for record in records[1:])
        gaps = [after["t"] - before["t"] for before, after in itertools.pairwise(records)]
        assert told == pytest.approx(
            statistics.median(r["target_tokens"] for r in records) / statistics.median(gaps), rel=0.35
        )
    usual = statistics.median(record["tokens_per_second"] for record in first)
    # All tokens over the new clock would be fifty times as many.
    assert max(record["tokens_per_second"] for record in second) < 8 * usual


def test_the_loss_is_that_of_all_ranks_weighted_by_their_tokens(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """M08: rank 0 reads one sentence again and again, rank 1 short random ones."""
    rng = random.Random(3)
    words = "the a cat dog bird tree house runs sees finds under over near red blue green small and then slowly".split()
    texts = {
        "text": ["the cat sees the small red house and then runs " * 12] * 40,
        "mixed": [" ".join(rng.choices(words, k=rng.randint(1, 4))) for _ in range(900)],
    }
    for name, lines in texts.items():
        source = tmp_path / f"{name}.jsonl"
        source.write_text(
            "".join(json.dumps({"id": f"{name}-{at}", "text": line}) + "\n" for at, line in enumerate(lines))
        )
        build = ["data", "build", str(source), "--tokenizer", str(runs.tiny.tokenizer), "--out", str(tmp_path / name)]
        build += ["--block-tokens", "256", "--shard-blocks", "8", "--workers", "1", "--keep-duplicates"]
        assert cli.main(build) == 0
    paths = [f"data.sources.{name}.path={tmp_path / name}" for name in texts]
    more = ["data.lanes=1", "batch.global_batch_size=2", "batch.micro_batch_size=1", "schedule.total_steps=40"]
    arguments = [word for word in runs.tiny.decoder("name=uneven", *more) if ".text." not in word] + paths
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    group = runs.pool.start(arguments, ranks=2, environment={"PRETRAIN_HOME": str(tmp_path)}, logs=logs)
    assert group.wait(90.0), group.output()
    assert group.codes == {0: 0, 1: 0}, group.output()
    capsys.readouterr()
    assert cli.main(["data", "explain", str(tmp_path / "uneven"), "--step", "39", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert sorted(row["source"] for row in rows) == ["mixed", "text"]  # one for each rank
    last = runs.records("uneven", 1)[-1]
    same, mixed = (last["sources"][name] for name in ("text", "mixed"))
    assert mixed["loss"] > same["loss"] + 0.5
    assert mixed["target_tokens"] < same["target_tokens"]
    total = same["target_tokens"] + mixed["target_tokens"]
    expected = (same["loss"] * same["target_tokens"] + mixed["loss"] * mixed["target_tokens"]) / total
    assert last["target_tokens"] == total
    assert last["loss"] == pytest.approx(expected, rel=1e-5)
