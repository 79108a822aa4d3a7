"""A rank takes the device of its local rank among those that it sees; on a CPU nothing asks for CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pretrain.errors import UserError
from pretrain.topology import World
from pretrain.train.rank import _prepare_device, locate_run
from tests.launch.runs import config_for

SECOND = World(rank=1, size=2, local_rank=1, ranks_per_node=2)


def test_the_local_rank_is_an_index_into_the_visible_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CUDA_VISIBLE_DEVICES=3 makes one device, number 0: a second rank there is refused, not sent to device 1."""
    config = config_for(tmp_path, fake={"steps": 1}, device="cuda")
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="rank 1 needs visible CUDA device 1 and 1 are visible"):
        _prepare_device(config, SECOND)
    assert chosen == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert _prepare_device(config, SECOND) == torch.device("cuda", 1)
    assert chosen == [1]


def test_on_a_cpu_nothing_asks_for_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def asked(*words: object) -> int:
        raise AssertionError("CUDA was asked")

    for name in ("set_device", "device_count", "is_available"):
        monkeypatch.setattr(torch.cuda, name, asked)
    assert _prepare_device(config_for(tmp_path, fake={"steps": 1}), SECOND) == torch.device("cpu")


def test_a_run_directory_that_a_node_does_not_see_is_named_with_the_node(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not seen on .*share.*PRETRAIN_HOME"):
        locate_run(str(tmp_path / "elsewhere"))
