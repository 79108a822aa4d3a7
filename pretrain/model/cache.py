"""Keys and values of sequences that are being decoded, grown in place up to a capacity.

Takes a model's new keys and values, layer by layer -> all of each sequence so far, packed. One or several
sequences of any lengths, each a document; memory grows as it is needed, in the dtype and on the device
of the keys. Cross-attention keeps the keys and values of the sources in `memory`, computed once.
Sequences may be chosen, repeated or dropped between two tokens (beams, finished ones).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pretrain.sequence import PrefixLayout, SeqInfo

_LEAST_TOKENS = 64


@dataclass(slots=True)
class LayerCache:
    """One layer's part.

    Attributes:
        capacity: most tokens of a sequence that fit.
        lengths: tokens held of each sequence.
        memory: keys and values [T_source, G, K] of cross-attention, packed; None in decoder-only models.
    """

    capacity: int
    lengths: tuple[int, ...] = (0,)
    memory: tuple[Tensor, Tensor] | None = None
    _new: tuple[int, ...] = (0,)
    _layout: SeqInfo | None = None
    _keys: Tensor | None = field(default=None, repr=False)  # [sequences, room, G, K]
    _values: Tensor | None = field(default=None, repr=False)

    def expect(self, counts: tuple[int, ...], layout: SeqInfo) -> None:
        """Says how many tokens of each sequence the next `append` brings, and the layout of all of them then."""
        self._new, self._layout = counts, layout

    def append(self, k_TGK: Float[Tensor, "T G K"], v_TGK: Float[Tensor, "T G K"]) -> tuple[Tensor, Tensor, SeqInfo]:
        """Keys, values and layout of the sequences with the new tokens at their ends."""
        assert self._layout is not None  # `Cache.next_info` came first
        ends = self._layout.lengths
        self._keys = self._grown(self._keys, k_TGK, max(ends))
        self._values = self._grown(self._values, v_TGK, max(ends))
        for held, new in ((self._keys, k_TGK), (self._values, v_TGK)):
            if len(set(self.lengths)) == len(set(self._new)) == 1:
                held[:, self.lengths[0] : ends[0]] = new.unflatten(0, (len(ends), -1))
            else:
                for row, part in enumerate(new.split(self._new)):
                    held[row, self.lengths[row] : ends[row]] = part
        self.lengths = ends
        return self._packed(self._keys), self._packed(self._values), self._layout

    def select(self, rows: Int[Tensor, " B"], lengths: tuple[int, ...]) -> None:
        """Keeps these sequences, in this order; one may come several times. `memory` is not touched."""
        self.lengths = lengths
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys.index_select(0, rows), self._values.index_select(0, rows)

    def _packed(self, held: Tensor) -> Tensor:
        if len(set(self.lengths)) == 1:
            return held[:, : self.lengths[0]].flatten(0, 1)
        return torch.cat([held[row, :length] for row, length in enumerate(self.lengths)])

    def _grown(self, held: Tensor | None, new_TGK: Float[Tensor, "T G K"], end: int) -> Tensor:
        """Room for `end` tokens: doubled when it is short, so that a capacity that is never reached costs nothing."""
        if held is not None and held.shape[1] >= end:
            return held
        room = min(self.capacity, max(2 * end, _LEAST_TOKENS))
        grown = new_TGK.new_empty((len(self.lengths), room, *new_TGK.shape[1:]))
        if held is not None:
            longest = max(self.lengths)
            grown[:, :longest] = held[:, :longest]
        return grown


@dataclass(slots=True)
class Cache:
    """All layers of some sequences.

    Attributes:
        source: encoded sources [T_source, D] and their layout, one per sequence; None in decoder-only models.
        bidirectional_prompt: the first tokens that are fed to each sequence see each other in both directions.
    """

    layers: list[LayerCache]
    source: tuple[Tensor, SeqInfo] | None = None
    bidirectional_prompt: bool = False

    @classmethod
    def empty(cls, num_layers: int, capacity: int, num_sequences: int = 1) -> Cache:
        return cls([LayerCache(capacity, (0,) * num_sequences) for _ in range(num_layers)])

    @property
    def length(self) -> int:
        """Tokens of the longest sequence so far."""
        return max(self.lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence so far."""
        return self.layers[0].lengths

    def next_info(self, counts: int | Sequence[int], device: torch.device) -> SeqInfo:
        """Layout of the tokens that are fed next, whose positions go on where their sequences end.

        Args:
            counts: of each sequence; a number is that of all of them together, in equal parts.

        Raises:
            ValueError: they do not fit.
        """
        held = self.lengths
        new = (counts // len(held),) * len(held) if isinstance(counts, int) else tuple(counts)
        ends = tuple(length + count for length, count in zip(held, new, strict=True))
        capacity = self.layers[0].capacity
        if max(ends) > capacity:
            raise ValueError(f"{max(ends)} tokens do not fit a cache of {capacity}")
        layout = documents((0,) * len(ends), ends, device)
        for layer in self.layers:
            layer.expect(new, layout)
        info = documents(held, new, device)
        if self.bidirectional_prompt and not any(held):
            whole = torch.arange(info.num_tokens, device=device)
            none = whole[:0]
            info = replace(info, prefix=PrefixLayout(whole, info, none, None, none, None, whole))
        return info

    def select(self, rows: Sequence[int], *, same_sources: bool = False) -> None:
        """Keeps these sequences, in this order; one may come several times.

        Args:
            same_sources: every place keeps the source that it has (beams of one source change places).
        """
        index = torch.tensor(rows, dtype=torch.int64)
        lengths = tuple(self.lengths[row] for row in rows)
        if self.source is not None and not same_sources:
            encoded_TD, info = self.source
            starts = info.cu_seqlens.tolist()
            kept = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in rows]).to(encoded_TD.device)
            sizes = tuple(info.lengths[row] for row in rows)
            self.source = (encoded_TD[kept], documents((0,) * len(sizes), sizes, encoded_TD.device))
            for layer in self.layers:
                if layer.memory is not None:
                    layer.memory = (layer.memory[0][kept], layer.memory[1][kept])
        for layer in self.layers:
            device = index.device if layer._keys is None else layer._keys.device
            layer.select(index.to(device), lengths)


def one_document(start: int, count: int, device: torch.device) -> SeqInfo:
    """One document of `count` tokens at positions start, start + 1, …"""
    return documents((start,), (count,), device)


def documents(starts: Sequence[int], counts: Sequence[int], device: torch.device) -> SeqInfo:
    """Documents of these tokens, each at positions from its start on."""
    edges = torch.zeros(len(counts) + 1, dtype=torch.int32)
    edges[1:] = torch.tensor(counts, dtype=torch.int32).cumsum(0)
    positions = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
    return SeqInfo(tuple(counts), edges.to(device), positions.to(device))
