"""Bad steps in whole runs: what is jumped over, what is computed again, and that it is exact.

The oracle is a run whose data stream never held the guilty rows; the weights of both are compared bit for bit.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint import list_checkpoints, weights_sha256
from pretrain.errors import ExitCode
from pretrain.rundir import RunDirectory
from tests.ranks_pool import Group, RankPool
from tests.tiny import Tiny, build_tiny, steps_of
from tests.train.guilty import digests_of_steps

ROWS = 8  # of a step
STEPS = ("schedule.total_steps=12", "checkpoint.every_steps=3")
WATCH = ("health.spike_z_score=12", "health.spike_window_steps=6")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def digests(tiny: Tiny) -> dict[int, list[str]]:
    return digests_of_steps(tiny.decoder("name=any"), range(13))


class Bench:
    """Runs of one test in its folder."""

    def __init__(self, tiny: Tiny, home: Path, pool: RankPool) -> None:
        self._tiny, self.home, self._pool = tiny, home, pool

    def start(self, name: str, *overrides: str, ranks: int = 2, faults: list[dict[str, Any]] | None = None,
              **variables: Any) -> Group:  # fmt: skip
        plan = self.home / f"{name}-faults.json"
        if faults is not None:
            plan.write_text(json.dumps(faults))
        environment = {"PRETRAIN_HOME": str(self.home), "PRETRAIN_FAULTS": str(plan)}
        cleared = {"GUILTY": "{}", "GUILTY_ONCE": "", "SKIP": "null"}
        environment |= cleared | {key: value if isinstance(value, str) else json.dumps(value)
                                  for key, value in variables.items()}  # fmt: skip
        arguments = self._tiny.decoder(f"name={name}", f"cluster.num_ranks={ranks}", *STEPS, *overrides)
        logs = [self.home / f"{name}-{rank}.log" for rank in range(ranks)]
        group = self._pool.start([*arguments, "--resume", "auto"], ranks=ranks, environment=environment, logs=logs,
                                 prelude="tests.train.guilty:install")  # fmt: skip
        ended = group.wait_for_one(90.0)
        group.wait(10.0)
        group.kill()
        assert ended, group.output()
        return group

    def train(self, name: str, *overrides: str, **more: Any) -> RunDirectory:
        group = self.start(name, *overrides, **more)
        assert set(group.codes.values()) == {0}, group.output()
        return RunDirectory.locate(str(self.home / name))


@pytest.fixture
def bench(tiny: Tiny, tmp_path: Path, rank_pool: RankPool) -> Bench:
    return Bench(tiny, tmp_path, rank_pool)


def _weights(run: RunDirectory) -> str:
    newest = list_checkpoints(run.checkpoints)[0]
    assert newest.step == 12
    return weights_sha256(run.checkpoints, newest.name)


def _events(run: RunDirectory, kind: str) -> list[dict[str, Any]]:
    return [event.fields for event in run.events() if event.kind == kind]


@pytest.mark.parametrize(("factor", "stage"), [("1000", 2), ("1000", 3), ("nan", 1)])
def test_two_ranks_jump_over_guilty_rows_and_end_as_if_they_had_never_been(bench, digests, factor, stage):
    # A spike must come again before it is believed; what is not finite goes back after the second step in a row.
    steps = [7] if factor == "1000" else [7, 8]
    guilty = {digests[step][1]: factor for step in steps}
    rows = [ROWS * steps[0], ROWS * (steps[-1] + 1)]
    overrides = WATCH if factor == "1000" else ("health.max_skipped_steps=1",)
    overrides = (*overrides, f"engine.zero_stage={stage}")
    run = bench.train("met", *overrides, GUILTY=guilty)
    spared = bench.train("spared", *overrides, SKIP=rows)
    assert _weights(run) == _weights(spared)
    (back,) = _events(run, "rolled_back")
    assert (back["step"], back["to_step"], back["rows"]) == (steps[-1] + 1, 6, rows)
    assert {event["verdict"] for event in _events(run, "step_rerun")} == {"data"}
    ours, theirs = steps_of(bench.home / "met"), steps_of(bench.home / "spared")
    assert {n: (r["loss"], r["gradient_norm"], r["data_digest"]) for n, r in ours.items()} == {
        n: (r["loss"], r["gradient_norm"], r["data_digest"]) for n, r in theirs.items()
    }
    assert [ours[step]["rollbacks"] for step in (6, 12)] == [0, 1]


@pytest.mark.parametrize("point", ["health.before_rollback", "health.after_rollback"])
def test_a_run_killed_while_it_goes_back_goes_back_again(bench, digests, point):
    guilty = {digests[7][0]: "1000"}
    kill = {"point": point, "do": "kill", "nth": 1, "rank": 1}
    killed = bench.start("torn", *WATCH, "checkpoint.ram_every_steps=1", f"checkpoint.ram_directory={bench.home}",
                         GUILTY=guilty, faults=[kill])  # fmt: skip
    assert killed.codes[1] == -signal.SIGKILL, killed.output()
    run = bench.train("torn", *WATCH, GUILTY=guilty)
    assert _weights(run) == _weights(bench.train("spared", *WATCH, SKIP=[7 * ROWS, 8 * ROWS]))


def test_what_is_finite_when_computed_again_was_the_hardware_and_changes_nothing(bench, digests):
    run = bench.train(
        "flaky", "engine.zero_stage=0", GUILTY={digests[4][1]: "nan"}, GUILTY_ONCE=str(bench.home / "once")
    )
    (rerun,) = _events(run, "step_rerun")
    assert (rerun["step"], rerun["verdict"]) == (5, "hardware")
    assert [rank.split(" ")[:2] for rank in rerun["ranks"]] == [["rank", "1"]]  # micro-batch 1 is rank 1's
    assert steps_of(bench.home / "flaky")[5]["applied"] is True
    assert _weights(run) == _weights(bench.train("calm", "engine.zero_stage=0"))


def test_a_run_that_stays_ill_ends_with_the_reason_and_code_8(bench, digests):
    guilty = {digest: "nan" for step in range(7, 13) for digest in digests[step]}
    group = bench.start("ill", "health.max_skipped_steps=1", "health.max_rollbacks=1", GUILTY=guilty)
    assert set(group.codes.values()) == {ExitCode.UNHEALTHY}, group.output()
    (failed,) = _events(RunDirectory.locate(str(bench.home / "ill")), "failed")
    assert failed["exit_code"] == ExitCode.UNHEALTHY
    assert (
        "2 steps in a row had a non-finite loss or gradient, up to step 9; rows were jumped over 1 times"
        in (failed["reason"])
    )
    assert "health.max_rollbacks=1 allows no more" in group.output()


def test_without_a_checkpoint_to_go_back_to_the_run_says_so(bench, digests):
    guilty = {digest: "nan" for step in range(1, 3) for digest in digests[step]}
    group = bench.start("young", "health.max_skipped_steps=1", ranks=1, GUILTY=guilty)
    assert group.codes == {0: ExitCode.UNHEALTHY}
    assert "no checkpoint of step 1 or before is there" in group.output()


def test_the_learning_rate_is_lowered_behind_each_jump(bench, digests):
    run = bench.train("lower", *WATCH, "health.rollback_learning_rate_factor=0.5", ranks=1,
                      GUILTY={digests[7][0]: "1000"})  # fmt: skip
    plain = bench.train("plain", ranks=1)
    rates = [{n: r["learning_rate"] for n, r in steps_of(Path(one.url)).items()} for one in (run, plain)]
    # Behind the jump every step that is computed has the lower rate, those before it that are repeated as well.
    assert [rates[0][n] / rates[1][n] for n in (6, 7, 8, 12)] == [1.0, 0.5, 0.5, 0.5]
