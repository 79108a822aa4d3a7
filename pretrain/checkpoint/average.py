"""The mean of several checkpoints' weights, which often scores better than the last of them.

takes -> store and names of one run's checkpoints; gives -> whole fp32 weights by name. Each mean is taken in
float64 over all checkpoints and rounded once; one checkpoint and the float64 sums are in memory.
Source: Vaswani et al. 2017, section 6.1 (the last 5, or 20).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pretrain.checkpoint.listing import CheckpointInfo, list_checkpoints
from pretrain.checkpoint.weights import read_weights
from pretrain.errors import CheckpointError
from pretrain.store import Store


def last_checkpoints(store: Store, count: int) -> list[str]:
    """Names of the newest `count` whole checkpoints, newest first; those of a line that was given up do not count.

    Raises:
        CheckpointError: there are fewer, or fewer than one is asked for.
    """
    found: list[CheckpointInfo] = []
    for info in list_checkpoints(store):  # newest attempt first: an older one counts up to where that went on
        if info.problem is None and (not found or info.step < found[-1].step):
            found.append(info)
    if not 1 <= count <= len(found):
        raise CheckpointError(
            f"{store.url} holds {len(found)} whole checkpoints, and {count} are to be averaged. "
            "Average at least 1, or keep more with checkpoint.keep_last."
        )
    return [info.name for info in found[:count]]


def average_weights(store: Store, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Whole fp32 weights by name, every checkpoint verified.

    Raises:
        CheckpointError: one is absent, damaged, or of another model.
    """
    sums: dict[str, torch.Tensor] = {}
    for number, name in enumerate(names):
        weights = read_weights(store, name)
        shapes = {parameter: tensor.shape for parameter, tensor in weights.items()}
        if number and shapes != {parameter: tensor.shape for parameter, tensor in sums.items()}:
            raise CheckpointError(
                f"{name} and {names[0]} in {store.url} are not of one model. Average those of one run."
            )
        for parameter, tensor in weights.items():
            if number:
                sums[parameter] += tensor
            else:
                sums[parameter] = tensor.double()
    return {parameter: (total / len(names)).float() for parameter, total in sums.items()}
