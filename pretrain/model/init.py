"""Initial weights: each parameter from its own stream, keyed by (seed, parameter name).

Takes a module tree whose modules carry `initial = {parameter: Initial}` -> fills it in fp32.
Invariant: the values do not depend on the order of construction, on the ranks or on which other
parameters exist. Source: own; xavier after Glorot and Bengio 2010, as in the 2017 Transformer.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Constant:
    """Every element the same."""

    value: float

    def fill(self, tensor: torch.Tensor, generator: torch.Generator) -> None:
        del generator
        tensor.fill_(self.value)


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal distribution around 0."""

    std: float

    def fill(self, tensor: torch.Tensor, generator: torch.Generator) -> None:
        tensor.normal_(0.0, self.std, generator=generator)


@dataclass(frozen=True, slots=True)
class Xavier:
    """Uniform with variance 2 gain^2 / (fan_in + fan_out), the fans of ONE matrix also where several are stacked."""

    fan_in: int
    fan_out: int
    gain: float = 1.0

    def fill(self, tensor: torch.Tensor, generator: torch.Generator) -> None:
        bound = self.gain * math.sqrt(6.0 / (self.fan_in + self.fan_out))
        tensor.uniform_(-bound, bound, generator=generator)


@dataclass(frozen=True, slots=True)
class Stacked:
    """Matrices below each other, of equally many rows, each by its own rule."""

    rules: tuple[Normal | Xavier, ...]

    def fill(self, tensor: torch.Tensor, generator: torch.Generator) -> None:
        for rule, part in zip(self.rules, tensor.chunk(len(self.rules)), strict=True):
            rule.fill(part, generator)


Initial = Constant | Normal | Xavier | Stacked


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fills every parameter in place; a tied one once, under its first name.

    Raises:
        ValueError: a module has a parameter without a rule (a mistake of whoever wrote the module).
    """
    done: set[int] = set()
    for prefix, module in model.named_modules():
        rules: dict[str, Initial] = getattr(module, "initial", {})
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in done:
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            if name not in rules:
                raise ValueError(f"{full_name} has no rule in {type(module).__name__}.initial")
            digest = hashlib.blake2b(f"{seed}/{full_name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            values = torch.empty(parameter.shape, dtype=torch.float32)
            rules[name].fill(values, generator)
            parameter.copy_(values)
            done.add(id(parameter))
