"""The mean of checkpoints against float64 arithmetic on what was saved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pretrain.checkpoint import average, average_weights, last_checkpoints, open_mean, save
from pretrain.checkpoint.listing import CheckpointInfo
from pretrain.engine.state import MASTER
from pretrain.errors import CheckpointError
from pretrain.store import open_store
from pretrain.topology import World
from tests.checkpoint.flips import Plain

STORE = open_store("/nowhere")


def info(attempt: int, step: int, problem: str | None = None) -> CheckpointInfo:
    return CheckpointInfo(f"step-{step:08d}-a{attempt:03d}", step, attempt, 1, 1, problem)


def test_the_mean_is_that_of_float64_rounded_once(tmp_path: Path) -> None:
    store, saved = open_store(tmp_path), {}
    for step in range(1, 8):
        source = Plain(step, shapes={"a": (50, 7), "b": (3,)} if step < 7 else {"a": (2,)})
        for state in source.state.values():
            state[MASTER] *= 10.0 ** (step - 4)
        save(store, source, step=step, attempt=1, training_state={}, world=World(), guard=lambda: None).wait()
        saved[f"step-{step:08d}-a001"] = {name: state[MASTER].clone() for name, state in source.state.items()}
    *names, odd = saved
    found = average_weights(store, names)
    assert {name: tuple(weight.shape) for name, weight in found.items()} == {"a": (50, 7), "b": (3,)}
    for parameter, weight in found.items():
        exact = np.mean([saved[name][parameter].numpy().astype(np.float64) for name in names], axis=0)
        np.testing.assert_array_equal(weight.flatten().numpy(), exact.astype(np.float32))
    with open_mean(store, names[:1], "test") as alone:
        assert torch.equal(alone["a"].flatten(), saved[names[0]]["a"])
    with pytest.raises(CheckpointError, match=rf"{odd} and {names[0]} .* are not of one model"):
        average_weights(store, [names[0], odd])


def test_the_newest_of_the_line_that_counts_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    # Attempt 2 went on from step 20, so step 30 of attempt 1 was given up.
    there = [info(2, 40), info(2, 30), info(1, 30), info(1, 20), info(1, 10, "a file is missing"), info(1, 5)]
    monkeypatch.setattr(average, "list_checkpoints", lambda store: there)
    assert last_checkpoints(STORE, 4) == [there[i].name for i in (0, 1, 3, 5)]
    for count in (0, 5):
        with pytest.raises(CheckpointError, match=rf"holds 4 whole checkpoints, and {count} are to be averaged"):
            last_checkpoints(STORE, count)
