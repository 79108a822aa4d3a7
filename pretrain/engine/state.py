"""What a checkpoint sees of an engine: fragments of the logical state, by parameter name.

The logical state is one flat fp32 array per parameter and key: "master" (the weights the optimizer
updates) and every per-element key of the optimizer ("exp_avg", "momentum_buffer", …). A fragment is
the part of it that lies on this rank, as views into the engine's own tensors. Importing this never
imports deepspeed. Source: own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

MASTER = "master"


@dataclass(frozen=True, slots=True)
class Fragment:
    """A contiguous range of one parameter's flat state on this rank.

    Attributes:
        name: parameter name.
        shape: shape of the whole parameter.
        numel: elements of the whole parameter.
        start: first element of the range.
        tensors: key -> 1-D view of the range; all of one length; always holds "master".
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    start: int
    tensors: dict[str, torch.Tensor]

    @property
    def length(self) -> int:
        return self.tensors[MASTER].numel()


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What the optimizer keeps beside the weights: per-element keys and per-group numbers."""

    element_keys: tuple[str, ...]
    scalar_keys: tuple[str, ...]


class Stateful(Protocol):
    """The engine as checkpoint/ sees it."""

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def state_spec(self) -> StateSpec: ...

    def fragments(self) -> list[Fragment]: ...

    def optimizer_scalars(self) -> dict[str, dict[str, float]]: ...

    def hyperparameters(self) -> dict[str, dict[str, object]]: ...

    def begin_restore(self, element_keys: tuple[str, ...], scalars: dict[str, dict[str, float]]) -> list[Fragment]: ...

    def end_restore(self) -> None: ...
