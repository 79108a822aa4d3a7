"""The mean of checkpoints against float64 arithmetic on what was saved."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pretrain.checkpoint import average
from pretrain.checkpoint.average import average_weights, last_checkpoints
from pretrain.checkpoint.listing import CheckpointInfo
from pretrain.errors import CheckpointError
from pretrain.store import open_store

STORE = open_store("/nowhere")


def info(attempt: int, step: int, problem: str | None = None) -> CheckpointInfo:
    return CheckpointInfo(f"step-{step:08d}-a{attempt:03d}", step, attempt, 1, 1, problem)


def test_the_mean_is_that_of_float64_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    saved = {
        f"c{n}": {"a": torch.randn(50, 7, generator=generator) * 10.0**n, "b": torch.randn(3, generator=generator)}
        for n in range(-3, 4)
    }
    monkeypatch.setattr(average, "read_weights", lambda store, name: saved[name])
    found = average_weights(STORE, list(saved))
    for name in ("a", "b"):
        exact = np.mean([weights[name].numpy().astype(np.float64) for weights in saved.values()], axis=0)
        np.testing.assert_array_equal(found[name].numpy(), exact.astype(np.float32))
    saved["odd"] = {"a": torch.zeros(2)}
    with pytest.raises(CheckpointError, match=r"odd and c-3 .* are not of one model"):
        average_weights(STORE, ["c-3", "odd"])


def test_the_newest_of_the_line_that_counts_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    # Attempt 2 went on from step 20, so step 30 of attempt 1 was given up.
    there = [info(2, 40), info(2, 30), info(1, 30), info(1, 20), info(1, 10, "a file is missing"), info(1, 5)]
    monkeypatch.setattr(average, "list_checkpoints", lambda store: there)
    assert last_checkpoints(STORE, 4) == [there[i].name for i in (0, 1, 3, 5)]
    for count in (0, 5):
        with pytest.raises(CheckpointError, match=rf"holds 4 whole checkpoints, and {count} are to be averaged"):
            last_checkpoints(STORE, count)
