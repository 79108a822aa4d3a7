"""Which rank this process is, read once from the environment that torchrun and the agents set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from pretrain.errors import UserError


@dataclass(frozen=True, slots=True)
class World:
    """Place of this process among the data-parallel ranks.

    Attributes:
        rank: global rank, 0 <= rank < size.
        size: number of ranks R.
        local_rank: rank within the node; the device index inside the visible devices.
        ranks_per_node: ranks on this node.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    ranks_per_node: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> World:
        """Reads RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; none of them means one rank.

        Raises:
            UserError: only some are set, or they contradict each other.
        """
        environ = os.environ if environ is None else environ
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        found = {name: environ[name] for name in names if environ.get(name)}
        if "RANK" not in found and "WORLD_SIZE" not in found:
            return cls()
        missing = [name for name in names if name not in found]
        if missing:
            raise UserError(
                f"{', '.join(missing)} not set while {', '.join(found)} is. "
                "A rank needs all of RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. "
                "Start it with torchrun or pretrain train, or unset them all."
            )
        try:
            rank, size, local_rank, ranks_per_node = (int(found[name]) for name in names)
        except ValueError:
            raise UserError(f"{found} holds something that is not a whole number.") from None
        if not (0 <= rank < size and 0 <= local_rank < ranks_per_node <= size):
            raise UserError(
                f"RANK={rank} WORLD_SIZE={size} LOCAL_RANK={local_rank} "
                f"LOCAL_WORLD_SIZE={ranks_per_node} contradict each other. "
                "The rule is 0 <= RANK < WORLD_SIZE and 0 <= LOCAL_RANK < LOCAL_WORLD_SIZE."
            )
        return cls(rank, size, local_rank, ranks_per_node)
