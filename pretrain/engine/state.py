"""What a checkpoint sees of an engine: fragments of the logical state, by parameter name.

The logical state is one flat fp32 array per parameter and key: "master" (the weights the optimizer
updates) and every per-element key of the optimizer ("exp_avg", "momentum_buffer", …). A fragment is
the part of it that lies on this rank, as views into the engine's own tensors. Importing this never
imports deepspeed. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

MASTER = "master"


@dataclass(frozen=True, slots=True)
class Fragment:
    """A contiguous range of one parameter's flat state on this rank.

    Attributes:
        name: parameter name.
        shape: shape of the whole parameter.
        start: first element of the range.
        tensors: key -> 1-D view of the range; all of one length; always holds "master".
    """

    name: str
    shape: tuple[int, ...]
    start: int
    tensors: dict[str, torch.Tensor]

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def length(self) -> int:
        """Elements of this range."""
        return self.tensors[MASTER].numel()

    def cut(self, first: int, last: int) -> Fragment:
        """The part whose elements have numbers first <= i < last within the parameter."""
        low, high = first - self.start, last - self.start
        return Fragment(self.name, self.shape, first, {key: view[low:high] for key, view in self.tensors.items()})


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """What the optimizer keeps beside the weights once it has stepped.

    Attributes:
        kind: name of its class.
        element_keys: state with one number per weight, for example exp_avg.
        scalar_keys: state with one number per group, for example step.
    """

    kind: str
    element_keys: tuple[str, ...]
    scalar_keys: tuple[str, ...]


Scalars = dict[str, dict[str, float]]  # parameter group -> key -> value


@runtime_checkable
class Stateful(Protocol):
    """The engine as checkpoint/ sees it."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every trained parameter with its whole shape, the same on every rank."""
        ...

    def optimizer_spec(self) -> OptimizerSpec: ...

    def fragments(self) -> list[Fragment]:
        """This rank's share: over all ranks every element is in exactly one fragment."""
        ...

    def optimizer_scalars(self) -> Scalars: ...

    def hyperparameters(self) -> dict[str, dict[str, Any]]: ...

    def begin_restore(self, element_keys: tuple[str, ...], scalars: Scalars) -> list[Fragment]:
        """The fragments that the caller fills, replicated ones whole on every rank."""
        ...

    def end_restore(self) -> None: ...


class FreshState:
    """Whole weights without an engine, and an optimizer that has not stepped: what a first checkpoint holds.

    Args:
        weights: fp32, by name.
        order: all names, in the model's order.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, order: list[str]) -> None:
        self._weights, self._optimizer, self._order = weights, optimizer, order

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self._weights[name].shape) for name in self._order}

    def optimizer_spec(self) -> OptimizerSpec:
        return probe_optimizer(self._optimizer)

    def fragments(self) -> list[Fragment]:
        return [
            Fragment(name, shape, 0, {MASTER: self._weights[name].detach().reshape(-1)})
            for name, shape in self.shapes().items()
        ]

    def optimizer_scalars(self) -> Scalars:
        return {}

    def hyperparameters(self) -> dict[str, dict[str, Any]]:
        return group_settings(self._optimizer.param_groups)

    def begin_restore(self, element_keys: tuple[str, ...], scalars: Scalars) -> list[Fragment]:
        raise NotImplementedError("a fresh state is only saved")

    def end_restore(self) -> None:
        raise NotImplementedError("a fresh state is only saved")


def group_settings(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The settings of an optimizer's groups by the name of the group, for the record."""
    return {
        str(group["name"]): {
            key: value for key, value in group.items() if isinstance(value, float | int | bool | tuple)
        }
        for group in groups
    }


def probe_optimizer(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """Learns the state keys of an optimizer by letting a twin step one tiny parameter."""
    parameter = torch.zeros(2)
    parameter.grad = torch.zeros(2)
    group = {key: value for key, value in optimizer.param_groups[0].items() if key in optimizer.defaults}
    twin = type(optimizer)([{**group, "params": [parameter]}])
    twin.step()
    state = {key: value for key, value in twin.state[parameter].items() if value is not None}
    elements = [key for key, value in state.items() if torch.is_tensor(value) and value.numel() == 2]
    scalars = [key for key in state if key not in elements]
    return OptimizerSpec(type(optimizer).__name__, tuple(sorted(elements)), tuple(sorted(scalars)))


def share_of_replicated(fragments: list[Fragment], rank: int, size: int) -> list[Fragment]:
    """Rank's contiguous 1/size of parameters that every rank holds whole, cut anywhere."""
    total = sum(fragment.length for fragment in fragments)
    first, last = total * rank // size, total * (rank + 1) // size
    mine, position = [], 0
    for fragment in fragments:
        low, high = max(first - position, 0), min(last - position, fragment.length)
        if low < high:
            mine.append(fragment.cut(fragment.start + low, fragment.start + high))
        position += fragment.length
    return mine
