"""Judging steps: against a plain robust z-score, and the ladder from skipping to stopping."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest

from pretrain.config.schema import HealthConfig
from pretrain.train.health import Finding, HealthState, Measured, judge, robust_z

WATCH = HealthConfig(spike_z_score=8.0, spike_window_steps=8)


def _step(number: int, loss: float | None = 3.0, norm: float = 1.0, *, applied: bool = True) -> Measured:
    return Measured(number, 8 * number, 8 * number + 8, loss, norm, applied)


def _after(config: HealthConfig, state: HealthState, *steps: Measured) -> HealthState:
    for step in steps:
        finding = judge(config, state, step)
        assert finding.back_to is None, finding
        state = finding.state
    return state


def _calm(count: int = 8) -> HealthState:
    draw = random.Random(3)
    near = [(3 + draw.uniform(-0.1, 0.1), 1 + draw.uniform(-0.1, 0.1)) for _ in range(count)]
    return _after(WATCH, HealthState(), *(_step(number, *values) for number, values in enumerate(near)))


def test_the_robust_z_score_is_the_one_of_the_textbook():
    known = [3.1, 2.9, 3.0, 3.3, 2.7, 3.05, 2.8]
    deviation = np.median(np.abs(np.array(known) - np.median(known)))
    assert robust_z(4.0, known) == pytest.approx(0.6745 * (4.0 - np.median(known)) / deviation, rel=1e-4)
    assert robust_z(3.0, [3.0] * 5) == 0.0
    assert robust_z(3.3, [3.0] * 5) == pytest.approx(10.0)  # no spread: a hundredth of the median counts as one
    assert robust_z(math.inf, known) == robust_z(math.nan, known) == math.inf


def test_a_spike_of_loss_or_gradient_is_computed_again_and_the_second_time_its_rows_are_jumped_over():
    for spike in (_step(8, loss=9.0), _step(8, norm=50.0), _step(8, loss=math.inf)):
        calm = _calm()
        first = judge(WATCH, calm, spike)
        assert (first.back_to, first.skip, first.verdict) == (8, None, "")
        assert first.suspect is not None
        assert first.suspect.step == 8
        replayed = HealthState(calm.losses, calm.gradient_norms, suspect=first.suspect)
        second = judge(WATCH, replayed, spike)
        assert (second.back_to, second.skip, second.verdict) == (8, (64, 72), "data")


def test_a_spike_that_does_not_come_again_was_the_hardwares_and_the_run_goes_on():
    first = judge(WATCH, _calm(), _step(8, loss=9.0))
    finding = judge(WATCH, HealthState(_calm().losses, _calm().gradient_norms, suspect=first.suspect), _step(8))
    assert (finding.back_to, finding.verdict) == (None, "hardware")
    assert finding.state.suspect is None
    assert finding.state.losses[-1] == 3.0


def test_downwards_too_early_or_unwatched_nothing_is_a_spike():
    assert judge(WATCH, _calm(), _step(8, loss=0.1, norm=0.01)).back_to is None
    assert judge(WATCH, _calm(3), _step(3, loss=90.0)).back_to is None
    assert judge(HealthConfig(), HealthState(), _step(8, loss=1e9, norm=1e9)) == Finding(HealthState())


def test_a_bad_step_and_one_without_targets_do_not_move_the_window():
    state = _calm()
    assert _after(WATCH, state, _step(8, None, math.inf, applied=False)).losses == state.losses
    assert _after(WATCH, state, _step(8, None, 0.0)) == state
    assert len(_after(WATCH, state, _step(8, 3.01)).losses) == 8


def test_too_many_skipped_steps_go_back_before_the_first_and_jump_over_all_of_them():
    config = HealthConfig(max_skipped_steps=2)
    bad = [_step(number, None, math.inf, applied=False) for number in (5, 6, 7)]
    state = _after(config, HealthState(), *bad[:2])
    finding = judge(config, state, bad[2])
    assert (finding.back_to, finding.skip) == (5, (40, 64))
    assert "3 steps in a row" in finding.why
    healthy = _after(config, state, _step(7))
    assert healthy.first_skipped is None
    assert judge(config, healthy, bad[2]).back_to is None


def test_the_state_survives_json():
    first = judge(WATCH, _calm(), _step(8, loss=math.inf, norm=50.0))
    state = HealthState(_calm().losses, _calm().gradient_norms, first.suspect, first.suspect, 2)
    assert HealthState.from_json(json.loads(json.dumps(state.to_json(), allow_nan=False))) == state
