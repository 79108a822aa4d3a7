"""Where the documents lie in a packed sequence: built once per micro-batch, read by every layer.

A micro-batch is one packed sequence of T tokens. Documents follow each other without gaps; padding
is a document of its own (the last one), so that `sum(lengths) == T` always.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SeqInfo:
    """Document layout of one packed sequence.

    Attributes:
        lengths: tokens of each document, all >= 1, kept on the host so that no layer waits for a
            device.
        cu_seqlens: int32 [N+1], cumulative lengths, starting with 0 and ending with T.
        positions: int64 [T], position inside the document, restarting at 0.
    """

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor
    positions: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.positions.shape[0])

    @property
    def max_length(self) -> int:
        return max(self.lengths)

    @classmethod
    def from_lengths(cls, lengths: list[int] | tuple[int, ...], device: torch.device | None = None) -> SeqInfo:
        """Derives the tensors from the document lengths.

        Raises:
            ValueError: no document, or an empty one (varlen kernels misbehave on those).
        """
        if not lengths or min(lengths) < 1:
            raise ValueError(f"document lengths must all be at least 1, got {lengths[:8]}")
        counts = torch.tensor(lengths, dtype=torch.int64)
        cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        torch.cumsum(counts, 0, out=cu_seqlens[1:])
        total = int(cu_seqlens[-1])
        positions = torch.arange(total) - torch.repeat_interleave(cu_seqlens[:-1], counts)
        return cls(
            lengths=tuple(int(n) for n in lengths),
            cu_seqlens=cu_seqlens.to(torch.int32).to(device),
            positions=positions.to(device),
        )

    def to(self, device: torch.device) -> SeqInfo:
        if self.positions.device == device:
            return self
        return SeqInfo(
            self.lengths,
            self.cu_seqlens.to(device, non_blocking=True),
            self.positions.to(device, non_blocking=True),
        )
