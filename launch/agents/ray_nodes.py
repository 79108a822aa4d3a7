"""Slots from Ray: a placement group per node, an agent actor in each.

Takes how many slots on which node → an agent that connects back. A slot is one CPU, or one GPU, of Ray's
count. One group per node, so that a lost node's group can be given back alone; a set of groups that is
not complete in time is given back whole. Ray's own clock is slow (a dead node shows after 13 s), so
nothing here decides about faults. Own design (DESIGN section 7, facts on placement in docs/decisions.md).
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from launch.agents.agent import Agent
from launch.controller.offers import Offer
from launch.controller.slots import SlotsTakenError

PLACE_WITHIN_S = 5.0
# Ray runs actors at nice 15, and an agent's ranks would inherit it: on a busy host neither got any time (measured).
NORMAL_PRIORITY = {"env_vars": {"RAY_worker_niceness": "0"}}


class AgentActor:
    """A node's agent as a Ray actor; `run` takes the actor's main thread for its whole life."""

    def run(self, controller: tuple[str, int], secret: str, node: str) -> None:
        Agent(controller, secret, node, ray.util.get_node_ip_address()).run()


class RayNodes:
    """`Nodes` of the Ray that this process is connected to.

    Args:
        runtime_env: of the agents.
    """

    def __init__(self, device: str, runtime_env: Mapping[str, Any] | None = None) -> None:
        self._runtime_env = runtime_env and dict(runtime_env)
        self._resource = "CPU" if device == "cpu" else "GPU"
        self._held: dict[str, tuple[PlacementGroup, Any]] = {}
        self._doors: dict[str, tuple[str, int]] = {}

    def offers(self) -> dict[str, Offer]:
        state = ray._private.state.state
        deadlines, now_ms = state.get_draining_nodes(), time.time() * 1000
        available = ray._private.state.available_resources_per_node()
        offers = {}
        for entry in ray.nodes():
            node = entry["NodeID"]
            if not entry["Alive"]:
                self._doors.pop(node, None)
                continue
            self._doors[node] = (entry["NodeManagerAddress"], int(entry["NodeManagerPort"]))
            # Without a deadline it goes as soon as it is idle, or when whoever asked loses patience.
            leaving_s = max(0.0, deadlines[node] - now_ms) / 1000 if node in deadlines else None
            slots = int(available.get(node, {}).get(self._resource, 0))
            offers[node] = Offer(slots, str(entry["NodeManagerHostname"]), leaving_s)
        return offers

    def door(self, node: str) -> tuple[str, int] | None:
        return self._doors.get(node)

    def launch(self, slots: Mapping[str, int], controller: tuple[str, int], secret: str) -> None:
        for node in slots:
            self.release(node)
        groups: dict[str, PlacementGroup] = {}
        try:
            for node, count in slots.items():
                label = [{"ray.io/node-id": node}]
                groups[node] = placement_group([{self._resource: count}], bundle_label_selector=label)
            self._fill(groups, slots, controller, secret)
        except BaseException:  # whatever it was: slots that nobody holds would be missing from every later order
            for node, group in groups.items():
                self._held.pop(node, None)
                with contextlib.suppress(Exception):  # its actor goes with it
                    remove_placement_group(group)
            raise

    def _fill(
        self, groups: Mapping[str, PlacementGroup], slots: Mapping[str, int], controller: tuple[str, int], secret: str
    ) -> None:
        """Waits for the groups and starts an agent in each."""
        deadline = time.monotonic() + PLACE_WITHIN_S
        missing = [node for node, group in groups.items() if not group.wait(max(0.1, deadline - time.monotonic()))]
        if missing:
            for taken in groups.values():
                remove_placement_group(taken)
            time.sleep(random.uniform(0.0, 2.0))  # two runs that block each other must not try in step
            raise SlotsTakenError(f"the slots of {len(missing)} nodes were taken meanwhile", missing)
        for node, group in groups.items():
            count = slots[node]
            actor = (
                ray.remote(AgentActor)
                .options(
                    max_restarts=0,
                    runtime_env=self._runtime_env,
                    num_cpus=count if self._resource == "CPU" else 0,
                    num_gpus=count if self._resource == "GPU" else 0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
                )
                .remote()
            )
            actor.run.remote(controller, secret, node)
            self._held[node] = (group, actor)

    def release(self, node: str) -> None:
        held = self._held.pop(node, None)
        if held is None:
            return
        group, actor = held
        with contextlib.suppress(Exception):  # a node that is gone took both with it
            ray.kill(actor)
        with contextlib.suppress(Exception):
            remove_placement_group(group)
