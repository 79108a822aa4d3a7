"""A copy of the engine's weights in a model of its own, for texts inside a run: the engine stays as it is.

takes → engine, config; gives → the model in fp32 on the CPU, at every ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from pretrain.config.schema import RunConfig
from pretrain.engine.engine import Engine
from pretrain.generate.load import load_weights


def copy_of_model(
    engine: Engine, config: RunConfig, alive: Callable[[], None], *, wanted: bool = True
) -> nn.Module | None:
    """The model, in evaluation mode; None where it is not wanted. A collective, whether wanted or not.

    Args:
        alive: called for each weight.
    """
    with engine.gathered_weights() as weights:
        if not wanted:
            return None
        whole = {}
        for name, weight in weights.items():
            whole[name] = weight.detach().to("cpu", torch.float32)
            alive()
        return load_weights(config.model, config.loss, whole, "the engine", seed=config.seed)
