"""Runs whose batch size and row length change: the same for any ranks, bit for bit after a resume, accounted for."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.checkpoint import list_checkpoints, weights_sha256
from pretrain.config import load_config
from pretrain.optim.schedules import learning_rate_at
from pretrain.rundir import RunDirectory
from tests.ranks import run_ranks
from tests.tiny import Tiny, build_tiny, steps_of
from tests.train.rank_programs import compiling_steps, trainings

# Tokens of a step: 8x32, then 12x32 from step 2, then 16x64 from the first step behind 1,000 slots (step 4).
STAGES = (
    "data.stages=[{from_step: 2, global_batch_size: 12},"
    " {from_tokens: 1000, global_batch_size: 16, sequence_length: 64, micro_batch_size: 1}]"
)
SLOTS = [256, 256, 384, 384, 1024, 1024, 1024, 1024]
COMMON = [STAGES, "schedule.kind=constant", "schedule.warmup_steps=2", "metrics.peak_flops_per_rank=1e9"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build_tiny(tmp_path_factory.mktemp("tiny"))


def train(ranks: int, home: Path, *runs: list[str]) -> None:
    results = run_ranks(trainings, ranks=ranks, arguments={"runs": list(runs), "home": str(home)}, timeout_s=280)
    assert [result.value for result in results] == [[0] * len(runs)] * ranks, results[0].output[-4000:]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_schedule_trains_the_same_on_any_ranks_and_after_a_resume(tiny: Tiny, tmp_path: Path, stage: int) -> None:
    common = [*COMMON, f"engine.zero_stage={stage}"]
    eight = ["schedule.total_steps=8"]
    ended = tiny.decoder("name=torn", *common, "schedule.total_steps=3")
    train(1, tmp_path, tiny.decoder("name=one", *common, *eight), ended)
    train(1, tmp_path, tiny.decoder("name=torn", *common, *eight, "--resume", "must"))
    runs = {"runs": [tiny.decoder("name=two", *common, *eight)], "home": str(tmp_path)}
    for result in run_ranks(compiling_steps, ranks=2, arguments=runs, timeout_s=280):
        # The start, and the other length; with more micro-batches of the same shape nothing is new.
        assert result.value == {"codes": [0], "compiling": [0, 4]}, result.output[-4000:]
    one, torn, two = (steps_of(tmp_path / name) for name in ("one", "torn", "two"))
    assert list(one) == list(range(1, 9))
    config, *overrides = tiny.decoder(*common, *eight)
    schedule = load_config(config, overrides).schedule
    for step, record in one.items():
        slots = SLOTS[step - 1]
        assert 0.85 * slots < record["target_tokens"] < slots  # the first token of a document is no target
        assert record["tokens"] == sum(one[s]["target_tokens"] for s in range(1, step + 1))
        assert record["learning_rate"] == learning_rate_at(step - 1, 1e-2, schedule)
        for field in ("loss", "gradient_norm", "data_digest", "learning_rate", "tokens"):
            assert torn[step][field] == record[field], (step, field)
        assert two[step]["data_digest"] == record["data_digest"]
        assert two[step]["loss"] == pytest.approx(record["loss"], rel=1e-5)
        assert two[step]["gradient_norm"] == pytest.approx(record["gradient_norm"], rel=1e-4)
    found = [RunDirectory.locate(str(tmp_path / name)) for name in ("one", "torn")]
    newest = [weights_sha256(run.checkpoints, list_checkpoints(run.checkpoints)[0].name) for run in found]
    assert newest[0] == newest[1]
    # MFU x time is the work of a step: it grows with the tokens, and more than that with the length.
    work = [record["mfu"] * record["step_s"] for record in one.values()]
    assert work[1] == pytest.approx(work[0], rel=1e-6)
    assert work[2] / work[0] == pytest.approx(1.5, rel=1e-6)
    assert work[7] / work[0] > 4.0
