"""Days of 4,096 nodes (thirty in the slow form): what the policy must keep to, and what faults may cost."""

from __future__ import annotations

import time

import pytest

from tests.launch.simulation import BEAT_S, DAY_S, Rates, World


@pytest.mark.parametrize("days", [2.0, pytest.param(30.0, marks=pytest.mark.slow)])
def test_days_of_4096_nodes_keep_every_commit_and_waste_little(days: float) -> None:
    began = time.process_time()
    world = World(seed=1, num_nodes=4096, rates=Rates())
    totals = world.play(days)
    seconds = time.process_time() - began
    print(f"{totals} in {seconds:.1f} s")
    assert world.outcome is None  # it is still running
    assert totals.faults > 4 * days
    assert totals.moves >= days
    assert totals.quarantined == ["h7"]  # the bad host, and nobody else
    assert totals.longest_down_s < 300.0
    assert totals.down_s / (days * DAY_S) < 0.01
    assert totals.hangs
    # A word of each rank every `BEAT_S`; judged at twice that, at the next word of the others.
    assert 2 * BEAT_S < totals.longest_hang_s < 3 * BEAT_S + 300.0
    # A fault redoes at most what was done since the last commit.
    assert totals.steps_redone < totals.faults * 125


@pytest.mark.parametrize("seed", range(2))
def test_a_config_error_at_any_moment_is_never_tried_again(seed: int) -> None:
    world = World(seed=seed, num_nodes=4096, rates=Rates(config_error_day=0.2 + seed / 5))
    world.play(1.0)
    assert world.outcome is not None
    assert world.outcome.exit_code == 2


def test_a_blackout_of_a_third_ends_the_run_as_interrupted_within_the_bound_and_loses_no_commit() -> None:
    nothing = Rates(node_deaths=0, cuts=0, crashes=0, hangs=0, drains=0, bad_host=0)
    world = World(seed=3, num_nodes=4096, rates=nothing)
    world.black_out(after_s=5000.0, share=1 / 3)
    world.play(2.0)
    assert world.outcome is not None
    assert (world.outcome.event, world.outcome.exit_code) == ("interrupted", 5)
    assert "no slots for 3000 ranks within cluster.slots_timeout_s=3600 s" in world.outcome.reason
    assert world.outcome.step == world.committed > 0
    assert 5000.0 + 3600.0 < world.now < 5000.0 + 4000.0
