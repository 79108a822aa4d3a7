"""What others' resumes got wrong (cases R09 to R16, M05): rates, schedules, dropout, ranks, stages."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from pathlib import Path

import pytest

from pretrain.checkpoint import list_checkpoints
from pretrain.checkpoint.files import read_manifest
from pretrain.config import load_config
from pretrain.data.batch import dropout_key
from pretrain.errors import ConfigError, PretrainError
from pretrain.rundir import RunDirectory
from tests.ranks_pool import Group, RankPool
from tests.tiny import Tiny, build_tiny, steps_of

PEAK, WARMUP, LAST = 1e-2, 5, 0.1


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build_tiny(tmp_path_factory.mktemp("tiny"))


def _train(pool: RankPool, tiny: Tiny, home: Path, name: str, *overrides: str, ranks: int = 1) -> Group:
    words = tiny.decoder(f"name={name}", f"schedule.warmup_steps={WARMUP}", "checkpoint.every_steps=5", *overrides)
    environment = {"PRETRAIN_HOME": str(home), "RATES": str(home / f"{name}.rates"), "PRETRAIN_FAULTS": ""}
    logs = [home / f"{name}-{rank}.log" for rank in range(ranks)]
    group = pool.start([*words, "--resume", "auto"], ranks=ranks, environment=environment, logs=logs,
                       prelude="tests.train.rates:install")  # fmt: skip
    assert group.wait(60.0), group.output()
    assert set(group.codes.values()) == {0}, group.output()
    return group


def _rates(home: Path, name: str) -> list[list[float]]:
    return [json.loads(line) for line in (home / f"{name}.rates").read_text().splitlines()]


def _cosine(step: int, total: int) -> float:
    """Linear warm-up from 0, then half a cosine down to a tenth, written here once more."""
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    done = (step + 1 - WARMUP) / (total - WARMUP)
    return PEAK * (LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * done)))


def test_after_a_resume_the_optimizer_steps_with_the_rates_of_an_uninterrupted_run(rank_pool, tiny, tmp_path):
    # A schedule that is 20 steps long and a run that ends at 10: max steps are part of the schedule, so it is stopped.
    stop = [{"point": "step.begins", "do": "exit:3", "nth": 11}]
    plan = tmp_path / "faults.json"
    plan.write_text(json.dumps(stop))
    words = tiny.decoder("name=torn", f"schedule.warmup_steps={WARMUP}", "schedule.total_steps=20",
                         "checkpoint.every_steps=5", "--resume", "auto")  # fmt: skip
    environment = {"PRETRAIN_HOME": str(tmp_path), "RATES": str(tmp_path / "torn.rates"), "PRETRAIN_FAULTS": str(plan)}
    first = rank_pool.start(words, ranks=1, environment=environment, logs=[tmp_path / "torn.log"],
                            prelude="tests.train.rates:install")  # fmt: skip
    assert first.wait(60.0)
    assert first.codes == {0: 3}, first.output()
    _train(rank_pool, tiny, tmp_path, "torn", "schedule.total_steps=20")
    _train(rank_pool, tiny, tmp_path, "whole", "schedule.total_steps=20")
    torn, whole = _rates(tmp_path, "torn"), _rates(tmp_path, "whole")
    begun = 30 - len(torn)  # 10 steps, then those from the newest checkpoint on, which the end may have cut short
    assert begun in (5, 10)
    assert torn[:10] == whole[:10]
    assert torn[10:] == whole[begun:]
    assert [rates[0] for rates in whole] == pytest.approx([_cosine(step, 20) for step in range(20)], rel=1e-6)
    assert all(len(set(rates)) == 1 for rates in whole)
    records = steps_of(tmp_path / "torn")
    assert [records[step + 1]["learning_rate"] for step in range(20)] == [rates[0] for rates in whole]


def test_more_steps_at_a_resume_are_told_and_the_rest_follows_the_new_schedule(rank_pool, tiny, tmp_path):
    _train(rank_pool, tiny, tmp_path, "longer", "schedule.total_steps=8")
    group = _train(rank_pool, tiny, tmp_path, "longer", "schedule.total_steps=16")
    assert "config change: schedule.total_steps" in group.output()
    assert "8 -> 16" in group.output() or "8 → 16" in group.output()
    rates = [rates[0] for rates in _rates(tmp_path, "longer")]
    expected = [_cosine(step, 8) for step in range(8)] + [_cosine(step, 16) for step in range(8, 16)]
    assert rates == pytest.approx(expected, rel=1e-6)


def test_a_run_goes_on_with_2_4_1_3_and_2_ranks_and_stages_1_3_2_0_and_1(rank_pool, tiny, tmp_path):
    _train(rank_pool, tiny, tmp_path, "whole", "schedule.total_steps=10", "engine.zero_stage=1", ranks=2)
    legs = list(zip((2, 4, 1, 3, 2), (1, 3, 2, 0, 1), strict=True))
    for number, (ranks, stage) in enumerate(legs):
        plan = tmp_path / f"leg-{number}.json"  # rank 0 waits there until its save is seen and all are killed
        plan.write_text(
            json.dumps([{"point": "step.begins", "do": "sleep:600", "nth": 3, "rank": 0}] if number < 4 else [])
        )
        words = tiny.decoder(
            "name=moved", f"schedule.warmup_steps={WARMUP}", "schedule.total_steps=10", "checkpoint.every_steps=2",
            f"engine.zero_stage={stage}", f"cluster.num_ranks={ranks}", "--resume", "auto",
        )  # fmt: skip
        environment = {"PRETRAIN_HOME": str(tmp_path), "RATES": str(tmp_path / "rates"), "PRETRAIN_FAULTS": str(plan)}
        logs = [tmp_path / f"moved-{number}-{rank}.log" for rank in range(ranks)]
        group = rank_pool.start(words, ranks=ranks, environment=environment, logs=logs)
        if number < 4:
            deadline = time.monotonic() + 60
            while _newest_step(tmp_path / "moved") != 2 * number + 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            group.kill()
        else:
            assert group.wait(60.0), group.output()
        assert set(group.codes.values()) == {-9 if number < 4 else 0}, group.output()
    run = RunDirectory.locate(str(tmp_path / "moved"))
    assert [event.fields["step"] for event in run.events() if event.kind == "restored"] == [2, 4, 6, 8]
    manifests = [read_manifest(run.checkpoints, info.name) for info in reversed(list_checkpoints(run.checkpoints))]
    assert [manifest.origin["ranks"] for manifest in manifests][-2:] == [3, 2]
    whole, moved = steps_of(tmp_path / "whole"), steps_of(tmp_path / "moved")
    assert [r["data_digest"] for r in moved.values()] == [r["data_digest"] for r in whole.values()]
    for step in range(1, 11):
        assert moved[step]["loss"] == pytest.approx(whole[step]["loss"], rel=1e-5), step


@pytest.mark.parametrize(("fault", "code"), [("kill", -signal.SIGKILL), ("error:EIO", 3), ("SIGTERM", 5)])
def test_the_record_of_the_last_step_is_there_however_the_run_ends(rank_pool, tiny, tmp_path, fault, code):
    """M05: at step 7 of 20 by SIGKILL, by an error nobody expects, by SIGTERM."""
    plan = tmp_path / "faults.json"
    asked = fault == "SIGTERM"
    plan.write_text(json.dumps([{"point": "step.logged", "do": "sleep:3" if asked else fault, "nth": 7}]))
    words = tiny.decoder("name=ends", "schedule.total_steps=20", "cluster.num_ranks=1")
    environment = {"PRETRAIN_HOME": str(tmp_path), "PRETRAIN_FAULTS": str(plan)}
    group = rank_pool.start(words, ranks=1, environment=environment, logs=[tmp_path / "ends.log"])
    if asked:
        deadline = time.monotonic() + 60
        while not plan.with_name("faults.json.fired-0").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(group.pids[0], signal.SIGTERM)
    assert group.wait(60.0), group.output()
    assert group.codes == {0: code}, group.output()
    assert list(steps_of(tmp_path / "ends")) == list(range(1, 8))


def _newest_step(run: Path) -> int | None:
    with contextlib.suppress(PretrainError):
        infos = [info for info in list_checkpoints(RunDirectory.locate(str(run)).checkpoints) if not info.problem]
        return infos[0].step if infos else None
    return None


def test_dropout_differs_in_every_micro_batch_and_follows_the_step_not_the_start():
    keys = [dropout_key(7, step, j) for step in range(10) for j in range(4)]
    assert len(set(keys)) == 40
    assert keys == [dropout_key(7, step, j) for step in range(10) for j in range(4)]


def test_fp16_with_its_loss_scale_is_refused_by_name(tiny):
    words = tiny.decoder("name=any", "engine.precision=fp16")
    with pytest.raises(ConfigError, match=r"engine\.precision=.*fp16"):
        load_config(words[0], words[1:])
