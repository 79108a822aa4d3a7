"""Positions that are added to the embedding: sinusoids and a learned table.

Sources: Vaswani et al. 2017 section 3.5 (sine and cosine interleaved); GPT-2 and BERT (learned).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from pretrain.model.init import Initial, Normal
from pretrain.model.positions.scaling import geometric_frequencies


@torch.no_grad()
def sinusoids(positions_T: Int[Tensor, " T"], width: int) -> Float[Tensor, "T D"]:
    """sin(p / 10000^(2i/D)) in column 2i and the cosine in column 2i + 1, fp32."""
    angles = torch.outer(positions_T.to(torch.float32), geometric_frequencies(width // 2, 10000.0, positions_T.device))
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)


class LearnedPositions(nn.Module):
    """A trained vector for each of the first `capacity` places of a document."""

    def __init__(self, capacity: int, width: int, initial: Initial | None = None) -> None:
        super().__init__()
        self.capacity = capacity
        self.weight = nn.Parameter(torch.empty(capacity, width))
        self.initial: dict[str, Initial] = {"weight": initial or Normal(0.02)}

    def forward(self, positions_T: Int[Tensor, " T"]) -> Float[Tensor, "T D"]:
        """The rows of the positions. A rule of the config keeps documents within `capacity`; only padding, whose
        outputs nobody reads, may be longer, and reads the last row."""
        return functional.embedding(positions_T.clamp(max=self.capacity - 1), self.weight)
