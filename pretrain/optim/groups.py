"""Which parameters decay: matrices and embeddings do, norms and biases do not.

Takes a model -> the optimizer's parameter groups, named. Invariants: every trainable parameter is in
exactly one group (a tied one once), in the model's own order, so that groups are the same on all ranks.
Source: Loshchilov and Hutter 2019 (decoupled decay); the split as in GPT-2 and Llama code.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups `decay` and `no_decay`; a group without parameters is left out.

    Args:
        model: before it is sharded (a sharded parameter has lost its shape).
        weight_decay: of the matrices.
    """
    trainable = [parameter for _, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"name": "decay", "params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"name": "no_decay", "params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
