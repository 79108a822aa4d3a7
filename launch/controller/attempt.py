"""One attempt: which rank runs on which agent, and the environment it starts with. PURE.

Invariants: ranks of one agent are consecutive, agents are filled in order, so LOCAL_RANK is an index
into the devices that the agent sees. Source: torchrun's variables, which `pretrain.topology` reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank runs."""

    rank: int
    agent: int
    local_rank: int
    ranks_per_node: int


@dataclass(frozen=True, slots=True)
class RankSetting:
    """What all attempts of a run start their ranks with.

    Attributes:
        command: the rank's command; `arguments_of` follow it, or `--standby`.
        environment: extra variables; win over the agent's own.
    """

    run_url: str
    command: Sequence[str]
    lease_token: str
    device: str = "cpu"
    threads_per_rank: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)

    def arguments_of(self, attempt: int) -> list[str]:
        return ["--run", self.run_url, "--attempt", str(attempt)]

    def fixed_environment(self) -> dict[str, str]:
        """Variables that are the same for every rank of every attempt: what a standby is started with."""
        variables = {"OMP_NUM_THREADS": self.threads_per_rank, "DS_ACCELERATOR": self.device, "PYTHONUNBUFFERED": 1}
        return {**self.environment, **{name: str(value) for name, value in variables.items()}}


def assign_ranks(slots: Mapping[int, int], num_ranks: int) -> list[RankPlace]:
    """Fills agents (number -> slots) in order with `num_ranks` consecutive ranks.

    Raises:
        ValueError: there are fewer slots than ranks.
    """
    places: list[RankPlace] = []
    for agent, free in slots.items():
        here = min(free, num_ranks - len(places))
        places += [RankPlace(len(places) + local, agent, local, here) for local in range(here)]
    if len(places) < num_ranks:
        raise ValueError(f"{sum(slots.values())} slots for {num_ranks} ranks")
    return places


def choose_nodes(free: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """Nodes and how many slots to take on each: the fewest nodes, the fullest first, ties by name.

    Raises:
        ValueError: there are fewer slots than ranks.
    """
    chosen: dict[str, int] = {}
    missing = num_ranks
    for node, slots in sorted(free.items(), key=lambda entry: (-entry[1], entry[0])):
        if missing and slots:
            chosen[node] = min(slots, missing)
            missing -= chosen[node]
    if missing:
        raise ValueError(f"{sum(free.values())} slots for {num_ranks} ranks")
    return chosen


def rank_environment(setting: RankSetting, place: RankPlace, num_ranks: int, master: tuple[str, int]) -> dict[str, str]:
    """A rank's own variables, as torchrun would set them and the lease under which it may publish.

    They come on top of the fixed ones, and are read after the imports only, so that a standby can take them.
    """
    variables = {
        "RANK": place.rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.ranks_per_node,
        "MASTER_ADDR": master[0],
        "MASTER_PORT": master[1],
        "PRETRAIN_LEASE": setting.lease_token,
    }
    return {name: str(value) for name, value in variables.items()}
