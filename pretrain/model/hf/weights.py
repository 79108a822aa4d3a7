"""A family's weights under our names and under theirs, and the way from one to the other. PURE.

Takes a state dict and a list of `Weight` -> the other state dict. Invariants: every tensor of the list is
there, of its shape, and none is left over; a round trip gives equal tensors; nothing is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain.errors import UserError


@dataclass(frozen=True, slots=True)
class Weight:
    """One of our parameters.

    Attributes:
        ours: its name here.
        theirs: its name there, or several whose rows together are ours.
        shape: of ours.
        rows: rows of each of theirs; they sum to shape[0].
        transposed: theirs has inputs as rows (GPT-2's Conv1D).
    """

    ours: str
    theirs: tuple[str, ...]
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    transposed: bool = False

    @classmethod
    def same(cls, ours: str, theirs: str, *shape: int, transposed: bool = False) -> Weight:
        """One of ours that is one of theirs."""
        return cls(ours, (theirs,), shape, shape[:1], transposed)

    @classmethod
    def fused(cls, ours: str, theirs: Sequence[str], rows: Sequence[int], *columns: int) -> Weight:
        """One of ours that is several of theirs, below each other."""
        return cls(ours, tuple(theirs), (sum(rows), *columns), tuple(rows))

    def their_shapes(self) -> list[tuple[int, ...]]:
        shapes = [(rows, *self.shape[1:]) for rows in self.rows]
        return [shape[::-1] for shape in shapes] if self.transposed else shapes


def layer_norm(ours: str, theirs: str, width: int) -> list[Weight]:
    """Weight and bias of a LayerNorm."""
    return [Weight.same(f"{ours}.{part}", f"{theirs}.{part}", width) for part in ("weight", "bias")]


def dense(ours: str, theirs: str, rows: int, columns: int, *, transposed: bool = False) -> list[Weight]:
    """Weight and bias of a projection."""
    return [
        Weight.same(f"{ours}.weight", f"{theirs}.weight", rows, columns, transposed=transposed),
        Weight.same(f"{ours}.bias", f"{theirs}.bias", rows),
    ]


def pieces_of(ours: Tensor, weight: Weight) -> Iterator[tuple[str, Tensor]]:
    """Theirs from one of ours, by their names: views, dtype kept."""
    pieces = ours.split(weight.rows) if len(weight.rows) > 1 else (ours,)
    for name, piece in zip(weight.theirs, pieces, strict=True):
        yield name, piece.t() if weight.transposed else piece


def from_hf_state(hf_state: Mapping[str, Tensor], weights: Sequence[Weight]) -> dict[str, Tensor]:
    """Our state dict by the names of `named_parameters()` (a tied matrix once).

    Raises:
        UserError: a tensor is missing, unknown or of another shape.
    """
    expected = {
        name: shape for weight in weights for name, shape in zip(weight.theirs, weight.their_shapes(), strict=True)
    }
    check_shapes({name: tuple(tensor.shape) for name, tensor in hf_state.items()}, expected, "model.safetensors")
    out: dict[str, Tensor] = {}
    for weight in weights:
        joined = torch.cat([hf_state[name] for name in weight.theirs]) if len(weight.theirs) > 1 else None
        whole = hf_state[weight.theirs[0]] if joined is None else joined
        out[weight.ours] = whole.t().contiguous() if weight.transposed else whole
    return out


def check_shapes(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raises UserError where the tensors are not those that are expected, naming the first three."""
    problems = [f"lacks {name}" for name in expected if name not in found]
    problems += [f"has unknown {name}" for name in found if name not in expected]
    problems += [
        f"has {name} of shape {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise UserError(
            f"{where} {', '.join(problems[:3])}{more}. They must be those of the config. "
            "Use the config that the weights were trained with."
        )
