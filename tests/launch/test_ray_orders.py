"""Orders of slots that Ray takes only in part: nothing of them stays held. Ray itself is in test_ray_nodes."""

from __future__ import annotations

from typing import Any

import pytest

from launch.agents import ray_nodes
from launch.agents.ray_nodes import RayNodes


class Group:
    def __init__(self, bundles: list[dict[str, int]]) -> None:
        self.bundles = bundles

    def wait(self, timeout_s: float) -> bool:
        return True


def test_slots_are_given_back_when_their_agents_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[Group] = []

    def no_actors(kind: type) -> Any:
        raise ConnectionError("the control service is gone")

    monkeypatch.setattr(ray_nodes, "placement_group", lambda bundles, **_: Group(bundles))
    monkeypatch.setattr(ray_nodes, "remove_placement_group", removed.append)
    monkeypatch.setattr(ray_nodes.ray, "remote", no_actors)
    nodes = RayNodes("cpu")
    with pytest.raises(ConnectionError):
        nodes.launch({"a": 2, "b": 1}, ("127.0.0.1", 1), "secret")
    assert [group.bundles for group in removed] == [[{"CPU": 2}], [{"CPU": 1}]]
