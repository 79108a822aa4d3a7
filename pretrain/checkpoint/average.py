"""The mean of several checkpoints' weights, which often scores better than the last of them.

takes -> store and names of one run's checkpoints; gives -> whole fp32 weights by name, each when it is asked for:
its mean is taken in float64 over all checkpoints and rounded once, and only it is in memory.
Source: Vaswani et al. 2017, section 6.1 (the last 5, or 20).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch

from pretrain.checkpoint.listing import CheckpointInfo, list_checkpoints
from pretrain.checkpoint.weights import StoredWeights, open_weights
from pretrain.errors import CheckpointError
from pretrain.store import Store


class MeanWeights(Mapping[str, torch.Tensor]):
    """Means of fp32 weights by name, each read when it is asked for; open while its context is.

    Attributes:
        parts: the checkpoints that are averaged.
        shapes: of all weights, which costs no reading.
    """

    def __init__(self, parts: Sequence[StoredWeights]) -> None:
        self.parts, self.shapes = tuple(parts), parts[0].shapes

    def __getitem__(self, parameter: str) -> torch.Tensor:
        if len(self.parts) == 1:
            return self.parts[0][parameter]
        total = self.parts[0][parameter].double()
        for part in self.parts[1:]:
            total += part[parameter]
        return (total / len(self.parts)).float()

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


@contextmanager
def open_mean(store: Store, names: Sequence[str], purpose: str) -> Iterator[MeanWeights]:
    """The mean of these checkpoints (of one: it itself), every byte checked as it is read; none is deleted meanwhile.

    Raises:
        CheckpointError: one is absent, damaged (also later, as it is read), or of another model.
    """
    with ExitStack() as stack:
        parts = [stack.enter_context(open_weights(store, name, purpose)) for name in names]
        for part in parts[1:]:
            if part.shapes != parts[0].shapes:
                raise CheckpointError(
                    f"{part.name} and {parts[0].name} in {store.url} are not of one model. Average those of one run."
                )
        yield MeanWeights(parts)


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
            f"{store.url} holds {len(found)} whole checkpoints, and {count} are to be averaged. A mean is of at least "
            "one, and of those that are there. Ask for as many, or keep more with checkpoint.keep_last."
        )
    return [info.name for info in found[:count]]


def average_weights(store: Store, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Whole fp32 weights by name, all in memory. Raises as `open_mean`."""
    with open_mean(store, names, "average") as weights:
        return dict(weights)
