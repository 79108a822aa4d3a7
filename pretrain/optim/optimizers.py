"""Optimizers by name: torch's own, built from the config.

Takes parameter groups and the optimizer section -> a torch optimizer at its peak learning rate; the
loop writes `learning_rate_at(step)` into the groups before each step. Adding one: a builder and a line
in `_BUILDERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pretrain.config.schema import AdamWConfig, OptimizerConfig, SGDConfig

Groups = list[dict[str, Any]]


def _adamw(groups: Groups, config: AdamWConfig) -> torch.optim.Optimizer:
    # One pass over the memory of a parameter: 2-4 times faster than the loop of separate operations.
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
    )


def _sgd(groups: Groups, config: SGDConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum)


_BUILDERS: dict[str, Callable[[Groups, Any], torch.optim.Optimizer]] = {"adamw": _adamw, "sgd": _sgd}


def build_optimizer(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that the config names, over groups that carry their own weight_decay.

    Raises:
        KeyError: a kind without a builder (a mistake of whoever added it to the schema).
    """
    return _BUILDERS[config.kind](groups, config)
