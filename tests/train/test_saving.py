"""Durable saves: failures are told and tried again by all ranks, up to a budget; the clock decides as well."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.ranks import RankResult, run_ranks
from tests.train import rank_saving


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[RankResult]:
    arguments = {"folder": str(tmp_path_factory.mktemp("saves"))}
    return run_ranks(rank_saving.failing_saves, ranks=2, arguments=arguments, timeout_s=120)


def test_one_rank_that_cannot_write_is_told_by_all_and_the_next_save_tries_again(pair: list[RankResult]) -> None:
    for rank in pair:
        result = rank.value["one rank"]
        assert result["saved_step"] == [1, 2, 3]
        assert result["good"] == [1, 3]
        # Three saves and what waits for the last. Only the copies are judged like a step, and nobody who waits for
        # another rank (+) is judged while that one still waits for its disk.
        copied, settled = ["copy+", "copy"], ["save", "save+"]
        first = ["save", "copy+", "allocate", "copy", *settled]
        assert result["phases"] == [*first, "save", *copied, *settled, "save", *copied, *settled]
        # The run's directory is asked before the others may wait for this rank.
        once = ["save", "save+", "guard", *copied, "guard"]  # the last one is the writing thread's
        assert rank.value["memory"] == [*once, *once]
    events = pair[0].value["one rank"]["events"]
    assert [(kind, step) for kind, step, _ in events] == [("committed", 1), ("save_failed", 2), ("committed", 3)]
    assert "rank 1 failed" in events[1][2]
    assert "No space left" in events[1][2]


def test_too_many_failures_in_a_row_end_the_run_on_every_rank_with_the_reason(pair: list[RankResult]) -> None:
    for rank in pair:
        message = rank.value["budget"]
        assert message.startswith("StoreError: 3 saves in a row failed, the last one of step-00000006-a001")
        assert "checkpoint.max_save_failures=2 allows no more" in message
        assert "No space left" in message


def test_the_last_state_is_tried_again_until_it_is_durable_and_saved_once(pair: list[RankResult]) -> None:
    for rank in pair:
        assert rank.value["last state"] == {"tries": 2, "good": [7], "again": 0}


def test_the_clock_of_rank_0_decides_for_all(pair: list[RankResult]) -> None:
    assert [rank.value["clock"] for rank in pair] == [[False, True, False], [False, False, False]]
    assert [rank.value["agreed"] for rank in pair] == [[True, False]] * 2


def test_a_failed_save_never_costs_the_only_good_checkpoint(pair: list[RankResult]) -> None:
    assert [rank.value["one kept"] for rank in pair] == [[1], [1]]


def test_the_measured_cost_and_failure_rate_decide_if_asked(pair: list[RankResult]) -> None:
    assert [rank.value["auto"] for rank in pair] == [[False, True, False], [False, False, False]]
    first, second = (rank.output for rank in pair)
    told = r"a save costs \S+ s and a failure is expected every 1e\+06 h: best is a save every \S+ s; applied"
    assert re.search(told, first)
    assert "a save costs" not in second


def test_every_run_ends_with_a_checkpoint_of_its_last_step(tmp_path: Path) -> None:
    """7 steps, saved every 3: 3, 6 and 7; 6 steps: 3 and 6, and not a second time."""
    from pretrain.checkpoint import list_checkpoints
    from pretrain.rundir import RunDirectory
    from tests.tiny import build_tiny
    from tests.train.rank_programs import trainings

    tiny = build_tiny(tmp_path)
    common = ("checkpoint.every_steps=3", "checkpoint.keep_last=9", "eval.every_steps=3", "checkpoint.every_minutes=60")
    best = ("checkpoint.keep_best.source=text", "checkpoint.keep_best.metric=loss")
    runs = [tiny.decoder(f"name=to-{steps}", f"schedule.total_steps={steps}", *common, *best) for steps in (6, 7)]
    arguments = {"runs": runs, "home": str(tmp_path)}
    assert [rank.value for rank in run_ranks(trainings, ranks=1, arguments=arguments, timeout_s=120)] == [[0, 0]]
    for steps, saved in ((6, [6, 3]), (7, [7, 6, 3])):
        run = RunDirectory.locate(str(tmp_path / f"to-{steps}"))
        found = list_checkpoints(run.checkpoints)
        assert [info.step for info in found] == saved
        assert [event.fields["step"] for event in run.events() if event.kind == "committed"] == saved[::-1]
        assert all((info.metric("text", "loss") or 0) > 0 for info in found)
