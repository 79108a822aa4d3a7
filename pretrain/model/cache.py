"""Keys and values of one sequence that is being decoded, grown in place up to a capacity.

Takes a model's new keys and values, layer by layer -> all of the sequence so far. A cache belongs to one
sequence (one document); memory grows as it is needed, in the dtype and on the device of the keys.
Cross-attention keeps the keys and values of the source in `memory`, computed once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from pretrain.sequence import SeqInfo

_LEAST_TOKENS = 64


@dataclass(slots=True)
class LayerCache:
    """One layer's part.

    Attributes:
        capacity: most tokens that fit.
        length: tokens held.
        memory: keys and values [T_source, G, K] of cross-attention; None in decoder-only models.
    """

    capacity: int
    length: int = 0
    memory: tuple[Tensor, Tensor] | None = None
    _keys: Tensor | None = field(default=None, repr=False)
    _values: Tensor | None = field(default=None, repr=False)

    def append(self, k_TGK: Float[Tensor, "T G K"], v_TGK: Float[Tensor, "T G K"]) -> tuple[Tensor, Tensor, SeqInfo]:
        """Keys, values and layout of the sequence with the new tokens at its end.

        Raises:
            ValueError: they do not fit.
        """
        end = self.length + k_TGK.shape[0]
        if end > self.capacity:
            raise ValueError(f"{end} tokens do not fit a cache of {self.capacity}")
        self._keys = self._grown(self._keys, k_TGK, end)
        self._values = self._grown(self._values, v_TGK, end)
        self._keys[self.length : end] = k_TGK
        self._values[self.length : end] = v_TGK
        self.length = end
        return self._keys[:end], self._values[:end], one_document(0, end, k_TGK.device)

    def _grown(self, held: Tensor | None, new_TGK: Float[Tensor, "T G K"], end: int) -> Tensor:
        """Room for `end` tokens: doubled when it is short, so that a capacity that is never reached costs nothing."""
        if held is not None and held.shape[0] >= end:
            return held
        grown = new_TGK.new_empty((min(self.capacity, max(2 * end, _LEAST_TOKENS)), *new_TGK.shape[1:]))
        if held is not None:
            grown[: self.length] = held[: self.length]
        return grown


@dataclass(slots=True)
class Cache:
    """All layers of one sequence.

    Attributes:
        source: encoded source [T_source, D] and its layout; None in decoder-only models.
    """

    layers: list[LayerCache]
    source: tuple[Tensor, SeqInfo] | None = None

    @classmethod
    def empty(cls, num_layers: int, capacity: int) -> Cache:
        return cls([LayerCache(capacity) for _ in range(num_layers)])

    @property
    def length(self) -> int:
        """Tokens of the sequence so far."""
        return self.layers[0].length

    def next_info(self, count: int, device: torch.device) -> SeqInfo:
        """Layout of the next `count` tokens, whose positions go on where the sequence ends."""
        return one_document(self.length, count, device)


def one_document(start: int, count: int, device: torch.device) -> SeqInfo:
    """One document of `count` tokens at positions start, start + 1, …"""
    return SeqInfo(
        (count,),
        torch.tensor((0, count), dtype=torch.int32, device=device),
        torch.arange(start, start + count, device=device),
    )
