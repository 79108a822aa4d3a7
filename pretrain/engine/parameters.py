"""A model's parameters and buffers before they are sharded: its optimizer, and the group of each by name."""

from __future__ import annotations

import torch
from torch import nn

from pretrain.config.schema import MuonConfig, OptimizerConfig
from pretrain.engine.muon import build_muon, muon_groups
from pretrain.engine.state import BUFFER, FROZEN
from pretrain.optim.groups import parameter_groups
from pretrain.optim.optimizers import build_optimizer


def persistent_buffers(model: nn.Module) -> tuple[str, ...]:
    """Names of the buffers that belong to a model's state."""
    kept = model.state_dict(keep_vars=True)
    return tuple(name for name, _ in model.named_buffers() if name in kept)


def optimizer_of(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that a config names, over the named groups of a model that is not sharded yet."""
    if isinstance(config, MuonConfig):
        return build_muon(muon_groups(model, config))
    return build_optimizer(parameter_groups(model, config.weight_decay), config)


def group_of_each(model: nn.Module, optimizer: torch.optim.Optimizer, buffers: tuple[str, ...]) -> dict[str, str]:
    """Name of a parameter or buffer -> name of its group in the optimizer, FROZEN or BUFFER."""
    named = {id(p): str(group["name"]) for group in optimizer.param_groups for p in group["params"]}
    groups = {name: named.get(id(parameter), FROZEN) for name, parameter in model.named_parameters()}
    return groups | dict.fromkeys(buffers, BUFFER)
