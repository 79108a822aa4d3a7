"""Ranks that share the experts of a model: each holds a part, tokens travel, DeepSpeed reduces the parts apart.

takes -> a whole model, the number of ranks that share; gives -> the same with this rank's part of every
`Experts`, and which elements of the whole that is. The whole goes under its own name and numbers into
fragments, so a checkpoint does not know how many ranks shared. DeepSpeed (0.19.8) makes the groups, averages an
expert's gradient over the ranks that hold it too, and sums norms over all. Source: own; groups as in Rajbhandari et
al. 2022 (DeepSpeed-MoE): neighbouring ranks share, equal places of the groups hold the same.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from pretrain.model.experts import Experts
from pretrain.topology import World


def share_experts(model: nn.Module, size: int, world: World) -> dict[str, int]:
    """Leaves this rank's experts in the model; gives the first element of the whole by name of the parameter.

    With a size of 1 nothing changes. No collective.
    """
    first: dict[str, int] = {}
    if size == 1:
        return first
    for prefix, module in list(model.named_modules()):
        if not isinstance(module, Experts):
            continue
        for name, whole in list(module.named_parameters(recurse=False)):
            rows = whole.shape[0] // size
            start = world.rank % size * rows
            part = nn.Parameter(whole.detach()[start : start + rows].clone())
            part.allreduce, part.group_name = False, _group_name(size)  # what DeepSpeed looks for
            setattr(module, name, part)
            first[f"{prefix}.{name}"] = start * math.prod(whole.shape[1:])
    model.add_module("expert_groups", _announce_to_deepspeed(size))
    return first


def mark_group(optimizer: torch.optim.Optimizer, size: int) -> None:
    """Tells DeepSpeed which of the optimizer's groups holds experts, by the name that it knows their ranks under."""
    for group in optimizer.param_groups:
        if group["name"] == "experts":
            group["name"], group["moe"] = _group_name(size), True


def connect_experts(module: nn.Module, size: int) -> None:
    """Gives every `Experts` the ranks that it exchanges tokens with. After `deepspeed.initialize`."""
    from deepspeed.utils import groups

    for part in module.modules():
        if isinstance(part, Experts):
            part.group = groups._get_expert_parallel_group(_group_name(size))


def _group_name(size: int) -> str:
    return f"ep_size_{size}"


def _announce_to_deepspeed(size: int) -> nn.Module:
    """A module without parameters by whose class DeepSpeed sees that there are experts."""
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    class ExpertGroups(MoE):
        def __init__(self) -> None:
            nn.Module.__init__(self)  # not MoE's own, which would make experts
            self.num_experts = size

        def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None:
            if _group_name(size) not in groups._get_expert_parallel_group_dict():
                groups._create_expert_and_data_parallel(size)

    return ExpertGroups()
