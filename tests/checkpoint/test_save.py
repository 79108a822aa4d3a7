"""Saving beside everything that can go wrong: slow and full disks, a failing rank, kills, a lost lease."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import ranks_checkpoint
from tests.ranks import RankResult, run_ranks


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[RankResult]:
    calls: dict[str, dict[str, Any]] = {"overlapping": {}, "failing_rank": {}, "fenced": {}}
    arguments = {"folder": str(tmp_path_factory.mktemp("saves")), "calls": calls}
    return run_ranks(ranks_checkpoint.several, ranks=2, arguments=arguments, timeout_s=120)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RankResult:
    calls: dict[str, dict[str, Any]] = {"remote": {}, "disk_full": {}}
    arguments = {"folder": str(tmp_path_factory.mktemp("alone")), "calls": calls}
    return run_ranks(ranks_checkpoint.several, ranks=1, arguments=arguments, timeout_s=120)[0]


def test_training_goes_on_while_a_save_is_written_and_does_not_change_it(pair: list[RankResult]) -> None:
    assert [rank.value["overlapping"] for rank in pair] == [{"pending": True, "state": True}] * 2


def test_a_rank_that_cannot_write_stops_the_save_at_once_and_the_last_good_one_stays(pair: list[RankResult]) -> None:
    first, second = (rank.value["failing_rank"] for rank in pair)
    assert first["message"].startswith("StoreError: step-00000002-a001 was not published: rank 1 failed:")
    assert "No space left" in first["message"]
    assert "No space left" in second["message"]
    assert first["waited_s"] < 10
    assert first["left"] == [
        ["step-00000002-a001", "no manifest: it was never published"],
        ["step-00000001-a001", None],
    ]
    assert first["after"] == [["step-00000002-a001", None], ["step-00000001-a001", None]]


def test_who_lost_the_run_neither_publishes_nor_deletes(pair: list[RankResult]) -> None:
    result = pair[0].value["fenced"]
    assert result["message"] == "FencedError: a newer attempt has the run"
    assert "MANIFEST.json" not in result["names"]
    assert result["pruned"] == "FencedError: a newer attempt has the run"
    assert result["kept"] == ["step-00000003-a001", "step-00000002-a001", "step-00000001-a001"]


def test_a_full_disk_leaves_no_part_and_the_last_good_checkpoint(alone: RankResult) -> None:
    result = alone.value["disk_full"]
    assert result["message"].startswith("StoreError: ")
    assert "rank-00000.safetensors" in result["message"]
    assert result["left"] == []
    assert result["restored"] == "step-00000001-a001"
    assert result["newest"] == "step-00000003-a001"


def test_an_object_store_serves_as_well(alone: RankResult) -> None:
    result = alone.value["remote"]
    assert result["step"] == 1
    assert result["state"]
    assert len(result["weights"]) == 64
    assert '"problem": null' in result["json"]


def test_a_kill_in_the_middle_of_a_save_costs_only_that_save(tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path)}
    killed = run_ranks(ranks_checkpoint.killed_while_saving, ranks=2, arguments=arguments, check=False)
    assert [rank.returncode for rank in killed] == [-9, -9]
    assert (tmp_path / "step-00000002-a001" / "rank-00000.safetensors").exists()
    result = run_ranks(ranks_checkpoint.restart_after_kill, ranks=2, arguments=arguments)[0].value
    assert result["step"] == 1
    assert result["skipped"] == [["step-00000002-a001", "no manifest: it was never published"]]
    assert sorted(result["pruned"]) == ["step-00000001-a001", "step-00000002-a001"]
    assert result["left"] == ["step-00000002-a002"]
