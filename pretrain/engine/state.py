"""What a checkpoint sees of an engine: fragments of the logical state, by parameter name.

The logical state is one flat fp32 array per parameter and key: "master" (the weights the optimizer
updates) and every per-element key that its optimizer group keeps ("exp_avg", "momentum_buffer", …). Frozen
parameters and persistent buffers have "master" only. A fragment is the part of it that lies on this
rank, as views into the engine's own tensors. Importing this never imports deepspeed. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

MASTER = "master"
FROZEN, BUFFER = "frozen", "buffer"  # groups of what no optimizer moves


@dataclass(frozen=True, slots=True)
class Fragment:
    """A contiguous range of one parameter's flat state on this rank.

    Attributes:
        name: parameter name.
        shape: shape of the whole parameter.
        start: first element of the range.
        tensors: key -> 1-D view of the range; all of one length.
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
        return next(iter(self.tensors.values())).numel()

    def cut(self, first: int, last: int) -> Fragment:
        """The part whose elements have numbers first <= i < last within the parameter."""
        low, high = first - self.start, last - self.start
        return Fragment(self.name, self.shape, first, {key: view[low:high] for key, view in self.tensors.items()})


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What the optimizer keeps beside the weights of a parameter group once it has stepped.

    Attributes:
        element_keys: state with one number per weight, for example exp_avg.
        scalar_keys: state with one number for the group, for example step.
    """

    element_keys: tuple[str, ...]
    scalar_keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """Kind (the name of its class), and what it keeps by parameter group: groups may differ (Muon and its Adam)."""

    kind: str
    groups: dict[str, GroupSpec]


Scalars = dict[str, dict[str, float]]  # parameter group -> key -> value


@runtime_checkable
class Savable(Protocol):
    """What a checkpoint is made from."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter and persistent buffer with its whole shape, the same on every rank."""
        ...

    def groups(self) -> dict[str, str]:
        """The optimizer's group of each of them, FROZEN or BUFFER."""
        ...

    def optimizer_spec(self) -> OptimizerSpec: ...

    def fragments(self) -> list[Fragment]:
        """This rank's share: over all ranks every element is in exactly one fragment."""
        ...

    def optimizer_scalars(self) -> Scalars: ...

    def hyperparameters(self) -> dict[str, dict[str, Any]]: ...


@runtime_checkable
class Stateful(Savable, Protocol):
    """The engine as checkpoint/ sees it: saved and restored."""

    def begin_restore(self, element_keys: Mapping[str, tuple[str, ...]], scalars: Scalars) -> list[Fragment]:
        """The fragments that the caller fills, replicated ones whole on every rank; keys by group."""
        ...

    def end_restore(self) -> None: ...


class FreshState:
    """Whole weights without an engine, and an optimizer that has not stepped: what a first checkpoint holds.

    Args:
        weights: fp32, by name.
        groups: the optimizer's group of each, in the model's order.
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, groups: Mapping[str, str]
    ) -> None:
        self._weights, self._optimizer, self._groups = weights, optimizer, dict(groups)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self._weights[name].shape) for name in self._groups}

    def groups(self) -> dict[str, str]:
        return dict(self._groups)

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


def group_settings(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The settings of an optimizer's groups by the name of the group, for the record."""
    return {
        str(group["name"]): {
            key: value for key, value in group.items() if isinstance(value, float | int | bool | tuple)
        }
        for group in groups
    }


def probe_optimizer(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """Learns what an optimizer keeps for each of its named groups by letting a twin step one tiny matrix."""
    return OptimizerSpec(
        type(optimizer).__name__,
        {str(group["name"]): _probe_group(optimizer, group) for group in optimizer.param_groups},
    )


def _probe_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> GroupSpec:
    if group.get("use_muon"):
        return GroupSpec(("momentum_buffer",), ())  # a step would compile its kernels
    parameter = torch.zeros(2, 3)
    parameter.grad = torch.zeros(2, 3)
    settings = {key: value for key, value in group.items() if key not in ("params", "name")}
    twin = type(optimizer)([{**settings, "params": [parameter]}])
    twin.step()
    state = {key: value for key, value in twin.state[parameter].items() if value is not None}
    elements = [key for key, value in state.items() if torch.is_tensor(value) and value.numel() == parameter.numel()]
    scalars = [key for key in state if key not in elements]
    return GroupSpec(tuple(sorted(elements)), tuple(sorted(scalars)))


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
