"""What others' resumes got wrong (cases R09 to R16): rates, schedules, dropout, ranks, stages."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from pretrain.config import load_config
from pretrain.data.batch import dropout_key
from pretrain.errors import ConfigError
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


@pytest.mark.parametrize(("ranks", "stage"), [(1, 3), (3, 1)])
def test_a_run_goes_on_with_other_ranks_and_another_stage_on_the_same_rows(rank_pool, tiny, tmp_path, ranks, stage):
    _train(rank_pool, tiny, tmp_path, "whole", "schedule.total_steps=12", ranks=2)
    _train(rank_pool, tiny, tmp_path, "moved", "schedule.kind=cosine", "schedule.total_steps=12",
           "cluster.num_ranks=2", "checkpoint.keep_last=9", ranks=2)  # fmt: skip
    later = tmp_path / "moved" / "checkpoints"
    for folder in later.iterdir():  # back to step 5
        if folder.is_dir() and not folder.name.startswith("step-00000005"):
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
    _train(rank_pool, tiny, tmp_path, "moved", "schedule.total_steps=12", f"engine.zero_stage={stage}",
           f"cluster.num_ranks={ranks}", "checkpoint.keep_last=9", ranks=ranks)  # fmt: skip
    whole, moved = steps_of(tmp_path / "whole"), steps_of(tmp_path / "moved")
    assert [r["data_digest"] for r in moved.values()] == [r["data_digest"] for r in whole.values()]
    for step in range(6, 13):
        assert moved[step]["loss"] == pytest.approx(whole[step]["loss"], rel=1e-5), step


def test_dropout_differs_in_every_micro_batch_and_follows_the_step_not_the_start():
    keys = [dropout_key(7, step, j) for step in range(10) for j in range(4)]
    assert len(set(keys)) == 40
    assert keys == [dropout_key(7, step, j) for step in range(10) for j in range(4)]


def test_fp16_with_its_loss_scale_is_refused_by_name(tiny):
    words = tiny.decoder("name=any", "engine.precision=fp16")
    with pytest.raises(ConfigError, match=r"engine\.precision=.*fp16"):
        load_config(words[0], words[1:])
