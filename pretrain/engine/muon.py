"""Muon with AdamW for what it is not made for, as DeepSpeed shards it: ZeRO stages 1 to 3.

takes -> named parameter groups, the optimizer section; gives -> the optimizer. DeepSpeed orthogonalizes whole
gradients before they are cut into partitions, so its own class is needed; the AdamW half is torch's.
Source: Jordan et al. 2024 (Muon); deepspeed/runtime/zero/muon (0.19.8).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pretrain.config.schema import MuonConfig
from pretrain.model.layers import Linear

MUON_KEYS = ("momentum_buffer",)


def muon_groups(model: nn.Module, config: MuonConfig) -> list[dict[str, Any]]:
    """Groups `muon` (weights of linear layers), `decay` (other matrices: embeddings, output, tables), `no_decay`.

    Marks each parameter with `use_muon`, which DeepSpeed looks for.
    """
    inside = {id(module.weight) for module in model.modules() if isinstance(module, Linear)}
    groups: dict[str, list[nn.Parameter]] = {"muon": [], "decay": [], "no_decay": []}
    for parameter in model.parameters():
        parameter.use_muon = id(parameter) in inside
        if parameter.requires_grad:
            group = "muon" if parameter.use_muon else "decay" if parameter.ndim >= 2 else "no_decay"
            groups[group].append(parameter)
    muon = {"use_muon": True, "momentum": config.momentum, "weight_decay": config.weight_decay, "ns_method": "gram"}
    adam = {"use_muon": False, "betas": (config.beta1, config.beta2), "eps": config.eps}
    settings: dict[str, dict[str, Any]] = {
        "muon": {"lr": config.learning_rate, **muon},
        "decay": {"lr": config.adam_learning_rate, "weight_decay": config.weight_decay, **adam},
        "no_decay": {"lr": config.adam_learning_rate, "weight_decay": 0.0, **adam},
    }
    return [
        {
            "name": name, "params": groups[name], **settings[name],
            "learning_rate_scale": settings[name]["lr"] / config.learning_rate,
        }
        for name in groups
        if groups[name]
    ]  # fmt: skip


def build_muon(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """DeepSpeed's Muon; its import compiles kernels, so only who wants Muon pays."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    optimizer: torch.optim.Optimizer = MuonWithAuxAdam(
        groups, adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs={"fused": True}
    )
    return optimizer
