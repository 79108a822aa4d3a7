"""A stack of layers, run in order, each recomputed in the backward pass where that is asked for.

The stack is where activation checkpointing happens, so no layer knows of it. Randomness is keyed
(see `dropout`), so no random state is saved or restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Hidden = TypeVar("Hidden", Tensor, tuple[Tensor, Tensor])


class LayerStack(nn.ModuleList):
    """Layers with the signature layer(x, *shared, own) -> x, where x is a tensor or several."""

    def __init__(self, layers: Iterable[nn.Module], *, checkpointed: bool) -> None:
        super().__init__(layers)
        self.checkpointed = checkpointed

    def forward(self, x: Hidden, *shared: Any, per_layer: Sequence[Any]) -> Hidden:
        """Runs all layers; `shared` goes to each, `per_layer` holds one more argument for each."""
        replay = self.checkpointed and self.training and torch.is_grad_enabled()
        for layer, own in zip(self, per_layer, strict=True):
            if replay:
                x = checkpoint(layer, x, *shared, own, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, *shared, own)
        return x
