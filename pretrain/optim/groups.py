"""Which parameters decay, and which learn slower: matrices and embeddings decay, norms and biases do not.

Takes a model -> the optimizer's parameter groups, named. A module may have a `learning_rate_scale` for its
matrices (muP). Invariants: every trainable parameter is in exactly one group (a tied one once), in the
model's own order, so that groups are the same on all ranks.
Source: Loshchilov and Hutter 2019 (decoupled decay); the split as in GPT-2 and Llama code.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def holds_experts(module: nn.Module) -> bool:
    """Whether the parameters of a module are those of experts."""
    return getattr(module, "num_experts", 0) > 0


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups `decay`, `decay_x0.25` (matrices that learn at a quarter of the rate) and so on, `experts`, `no_decay`.

    Experts decay too; they are apart because ranks may share them.

    Each has `learning_rate_scale`, by which the step's rate is multiplied. Those without parameters are left out.

    Args:
        model: before it is sharded (a sharded parameter has lost its shape).
        weight_decay: of the matrices.
    """
    scales = {
        id(parameter): float(getattr(module, "learning_rate_scale", 1.0))
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if parameter.ndim >= 2
    }
    trainable = [parameter for _, parameter in model.named_parameters() if parameter.requires_grad]
    experts = {
        id(parameter) for module in model.modules() if holds_experts(module) for parameter in module.parameters()
    }
    matrices = [parameter for parameter in trainable if parameter.ndim >= 2 and id(parameter) not in experts]
    groups = [
        {
            "name": "decay" if scale == 1.0 else f"decay_x{scale:g}",
            "params": [parameter for parameter in matrices if scales[id(parameter)] == scale],
            "weight_decay": weight_decay,
            "learning_rate_scale": scale,
        }
        for scale in sorted({1.0, *scales.values()}, reverse=True)
    ]
    apart = [parameter for parameter in trainable if id(parameter) in experts]
    groups.append({"name": "experts", "params": apart, "weight_decay": weight_decay, "learning_rate_scale": 1.0})
    others = [parameter for parameter in trainable if parameter.ndim < 2]
    groups.append({"name": "no_decay", "params": others, "weight_decay": 0.0, "learning_rate_scale": 1.0})
    return [group for group in groups if group["params"]]
