"""A short campaign on rank processes: each run is hurt at a named point and ends as the untouched one, bit for bit.

The whole campaign is `python -m tests.chaos`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.direct import DirectBench
from tests.chaos.plan import Trial, direct_trials
from tests.ranks_pool import RankPool
from tests.tiny import build_tiny

# One of each kind: inside a save, a load, a write; two at once; a stopped rank; a full disk; damage.
CHOSEN = (
    "save.written", "save.before_manifest", "store.before_rename", "load.verified", "load.read", "journal.before",
    "two", "stop", "full disk", "flip", "slow disk",
)  # fmt: skip


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPool) -> DirectBench:
    folder: Path = tmp_path_factory.mktemp("chaos")
    (folder / "data").mkdir()
    return DirectBench(folder, build_tiny(folder / "data"), rank_pool)


@pytest.mark.parametrize("tag", CHOSEN)
def test_a_hurt_run_ends_as_the_untouched_one(bench: DirectBench, tag: str) -> None:
    _check(bench, next(trial for trial in direct_trials(160, seed=0) if tag in trial.counted))


@pytest.mark.parametrize("point", ["step.after_update", "load.read"])
def test_a_hurt_run_whose_ranks_share_experts_ends_as_the_untouched_one(bench: DirectBench, point: str) -> None:
    shared = [trial for trial in direct_trials(160, seed=0) if trial.experts and trial.ranks == 2]
    _check(bench, next(trial for trial in shared if point in trial.counted))


def _check(bench: DirectBench, trial: Trial) -> None:
    result = bench.run(trial)
    assert result.fired, f"{trial.name} did not fire"
    assert result.problems == (), trial.name
