"""Collectives beside DeepSpeed: exact, the same everywhere, and clear when a rank is gone."""

from __future__ import annotations

import time

import pytest
import torch

from pretrain.engine.distributed import all_reduce_sums, broadcast_bytes, gather_texts, start_process_group, vote
from pretrain.errors import PretrainError, UserError
from pretrain.topology import World
from tests.engine import ranks_training
from tests.ranks import run_ranks


def test_sums_are_exact_and_votes_reach_everyone() -> None:
    results = run_ranks(ranks_training.collectives, ranks=3)
    for result in results:
        value = result.value
        assert value["sums"][0] == 3 * (2**62 - 1) - 3  # beyond int64
        assert value["sums"][1] == -15
        assert value["sums"][2] == pytest.approx(0.6, abs=1e-15)
        assert value["sums"][3] == 1e300
        assert value["texts"] == ["", "ü", "üü"]
        assert value["told"] == "from 0"
        assert value["failed"] == "rank 1: no space"
        assert value["infinite"] == "nan"


def test_a_killed_peer_becomes_an_error_that_blames_nobody_else() -> None:
    started = time.monotonic()
    results = run_ranks(ranks_training.dying_peer, ranks=3, check=False)
    assert time.monotonic() - started < 30
    assert results[2].returncode == -9
    assert all("another rank is gone" in result.value for result in results[:2])


def test_without_a_group_one_rank_agrees_with_itself() -> None:
    assert all_reduce_sums([3, 2.5]) == [3, 2.5]
    assert gather_texts("alone") == ["alone"]
    assert broadcast_bytes(b"x") == b"x"
    vote(True)
    with pytest.raises(PretrainError, match="disk full"):
        vote(False, "disk full")


def test_several_ranks_without_an_address_are_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match="torchrun or pretrain train"):
        start_process_group(World(0, 2, 0, 2), torch.device("cpu"), 5.0)
