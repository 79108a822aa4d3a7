"""A run that is traced at one step and runs out of memory at another, inside rank processes that are up."""

from __future__ import annotations

import os
from typing import Any

import torch

from pretrain.__main__ import main
from pretrain.model.decoder import Decoder
from pretrain.topology import World


def hungry(world: World, arguments: list[str], home: str, step: int) -> int:
    """The exit code of a run whose forward pass asks for a petabyte at `step` on rank 1."""
    os.environ["PRETRAIN_HOME"] = home
    forward, passes = Decoder.forward, [0]

    def asks(self: Decoder, batch: Any) -> Any:
        passes[0] += 1
        if world.rank == 1 and passes[0] > 2 * (step - 1):  # two micro-batches a step
            torch.empty(1 << 50)
        return forward(self, batch)

    Decoder.forward = asks  # type: ignore[method-assign]
    return int(main(arguments))
