"""The peak of a rank: measured once in a run on a host, again where anything about it changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pretrain.metrics.peak import PEAK_KEY, remembered_peak
from pretrain.store import open_store

CPU = torch.device("cpu")


def test_a_restart_takes_the_peak_that_was_measured_before_and_does_not_measure(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert remembered_peak(store, CPU, lambda: 3e10) == 3e10
    assert remembered_peak(store, CPU, lambda: pytest.fail("measured again")) == 3e10


@pytest.mark.parametrize(
    "kept",
    [
        b"{",
        b"[]",
        json.dumps({"host": "another", "threads": torch.get_num_threads(), "flops": 1.0}).encode(),
        b'{"flops": 1.0}',
    ],
)
def test_what_does_not_fit_this_host_or_is_damaged_is_measured_again(tmp_path: Path, kept: bytes) -> None:
    store = open_store(tmp_path)
    store.put(PEAK_KEY, kept)
    assert remembered_peak(store, CPU, lambda: 4e10) == 4e10
    assert json.loads(store.get(PEAK_KEY))["flops"] == 4e10


def test_a_data_sheet_or_an_unknown_peak_is_not_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert remembered_peak(store, torch.device("cuda"), lambda: 1e15) == 1e15
    assert remembered_peak(store, CPU, lambda: None) is None
    assert not store.exists(PEAK_KEY)
