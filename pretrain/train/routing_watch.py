"""How evenly the routers of a step used their experts, and the losses that keep them usable.

Takes the micro-batches of a step while they are computed -> numbers that are added up over the ranks -> fields of the
step's record. Values stay on the device until then. Losses are weighted by targets, as in the objective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pretrain.config.schema import MoEConfig
from pretrain.model.routing import routing_told
from pretrain.sequence import Batch


class RoutingWatch:
    """See the module."""

    def __init__(self, config: MoEConfig) -> None:
        self._layers, self._experts = config.num_layers, config.num_experts
        self._told: list[tuple[int, list[tuple[Tensor, Tensor]]]] = []  # targets; counts and losses by layer

    @contextmanager
    def forward(self, batch: Batch) -> Iterator[None]:
        """Open during the forward pass of one micro-batch."""
        layers: list[tuple[Tensor, Tensor]] = []
        self._told.append((batch.target_tokens, layers))
        with routing_told(lambda counts_E, losses: layers.append((counts_E, losses))):
            yield

    def values(self) -> list[int | float]:
        """Targets, sums of balance and z over them, and the choices of each expert of each layer; as many of them on
        every rank."""
        counts_LE = torch.zeros(self._layers, self._experts, dtype=torch.int64)
        losses, targets = torch.zeros(2, dtype=torch.float64), 0
        for weight, layers in self._told:
            counts_LE += torch.stack([counts_E for counts_E, _ in layers]).cpu()
            losses += weight * torch.stack([own for _, own in layers]).double().mean(dim=0).cpu()
            targets += weight
        return [targets, *losses.tolist(), *counts_LE.flatten().tolist()]

    def fields(self, sums: Sequence[int | float]) -> dict[str, Any]:
        """Fields of the record, from the sums of every rank's `values`."""
        targets, balance, z, *counts = sums
        layers = [counts[first : first + self._experts] for first in range(0, len(counts), self._experts)]
        return {
            "balance_loss": balance / targets if targets else None,
            "router_z_loss": z / targets if targets else None,
            "largest_expert_share": max(max(layer) / sum(layer) for layer in layers) if any(counts) else None,
            "idle_experts": sum(not count for count in counts),
        }
