"""A step's loss is a sum divided once; a step without targets has none, and no step has a made-up one."""

from __future__ import annotations

import math

import pytest
import torch

from pretrain.engine.engine import StepOutcome
from pretrain.train.agreement import Agreement
from pretrain.train.own_work import OwnWork
from pretrain.train.records import StepRecord
from pretrain.train.stop import StopReason


def _record(targets: int, *sums: float) -> StepRecord:
    agreed = Agreement(targets, 0, 0, 0, StopReason.NONE, False)
    return StepRecord(agreed, StepOutcome(True, 1.0), 1e-3, torch.tensor(sums, dtype=torch.float64))


def test_the_loss_is_the_sum_over_the_targets() -> None:
    assert _record(8, 20.0, 16.0, 4.0).loss() == 2.0


def test_a_step_without_targets_has_no_loss_instead_of_zero() -> None:
    assert _record(0, 0.0, 0.0, 0.0).loss() is None


def test_what_is_not_finite_stays_so() -> None:
    assert math.isnan(_record(8, math.nan, math.nan, 0.0).loss() or 0.0)


def test_own_work_is_waiting_for_data_and_forward_passes_since_the_last_look() -> None:
    forward = [1.0]
    work = OwnWork(lambda: forward[0])
    assert work.take() is None
    forward[0] += 0.25
    assert work.take() == pytest.approx(0.25)
    with work.waiting():
        pass
    assert 0 <= (work.take() or 0.0) < 0.1
