"""Collectives when a rank is gone or alone; what they compute is checked beside the curves of several ranks."""

from __future__ import annotations

import time

import pytest
import torch

from pretrain.engine.distributed import all_reduce_sums, broadcast_bytes, gather_texts, start_process_group, vote
from pretrain.errors import PretrainError, UserError
from pretrain.topology import World
from tests.engine import ranks_training
from tests.ranks import run_ranks
from tests.ranks_pool import shared_pool


def test_a_killed_peer_becomes_an_error_that_blames_nobody_else() -> None:
    shared_pool()  # its start is not measured
    started = time.monotonic()
    results = run_ranks(ranks_training.dying_peer, ranks=2, check=False)
    assert time.monotonic() - started < 30
    assert results[1].returncode == -9
    assert "another rank is gone" in results[0].value


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
