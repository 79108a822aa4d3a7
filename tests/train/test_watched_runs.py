"""What watching a real run costs its loop, and that heads which have gone wrong are told of wherever people look."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch import cli
from launch.monitor.facts import run_facts
from launch.monitor.reader import RunReader
from pretrain.rundir import RunDirectory
from tests.ranks_pool import RankPool
from tests.tiny import Tiny, build_tiny, steps_of


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build_tiny(tmp_path_factory.mktemp("tiny"), documents=120)


def test_the_loop_asks_a_device_for_values_at_logged_steps_alone(
    rank_pool: RankPool, tiny: Tiny, tmp_path: Path
) -> None:
    rare = ("metrics.log_every_steps=5", "metrics.layers_every_steps=10", "checkpoint.every_steps=12")
    words = tiny.decoder("name=quiet", "schedule.total_steps=12", "cluster.num_ranks=1", *rare)
    environment = {"PRETRAIN_HOME": str(tmp_path), "HOST_READS": str(tmp_path / "reads.json")}
    group = rank_pool.start(words, ranks=1, environment=environment, logs=[tmp_path / "quiet.log"],
                            prelude="tests.train.host_reads:install")  # fmt: skip
    assert group.wait(60.0), group.output()
    assert group.codes == {0: 0}, group.output()
    reads = {int(step): count for step, count in json.loads((tmp_path / "reads.json").read_text()).items()}
    logged = list(steps_of(tmp_path / "quiet"))
    assert logged == [5, 10, 12]
    assert {step for step, count in reads.items() if count and step < 12} == {5, 10}
    assert reads[10] > reads[5] > 0  # it does count; with the layers there is more to ask for


def test_heads_that_have_gone_wrong_are_told_of_in_records_log_page_and_by_inspect(
    rank_pool: RankPool, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = ("model.qk_norm=off", "model.init_std=0.0001", "metrics.layers_every_steps=1", "schedule.total_steps=2")
    for name, more in (("flat", flat), ("fine", flat[2:])):
        words = tiny.decoder(f"name={name}", "cluster.num_ranks=1", *more)
        home, logs = {"PRETRAIN_HOME": str(tmp_path)}, [tmp_path / f"{name}.log"]
        group = rank_pool.start(words, ranks=1, environment=home, logs=logs)
        assert group.wait(60.0), group.output()
        assert group.codes == {0: 0}, group.output()
        reader = RunReader(RunDirectory.locate(str(tmp_path / name)))
        reader.refresh()
        capsys.readouterr()
        prompt = "the cat sees the small red house under the tree and runs slowly"
        assert (
            cli.main(
                ["inspect", "attention", str(tmp_path / name), "--prompt", prompt, "--out", str(tmp_path / "a.png")]
            )
            == 0
        )
        told = {
            "records": " ".join(steps_of(tmp_path / name)[1].get("warnings", [])),
            "page": " ".join(run_facts(reader)["warnings"]),
            "log": " ".join(line for line in group.output().splitlines() if "WARNING" in line),
            "inspect": " ".join(line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")),
        }
        for place, words in told.items():
            for head in range(4):
                assert (f"decoder.0 head {head} is near uniform" in words) == (name == "flat"), (name, place, words)
