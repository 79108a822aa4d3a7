"""The values that flow from the loader into the model: the layout of a packed sequence, and a micro-batch.

A micro-batch is one packed sequence of T tokens. Documents follow each other without gaps; padding
is a document of its own (the last one), so that `sum(lengths) == T` always. The first part of a document
may see itself in both directions (`PrefixLayout`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class SeqInfo:
    """Document layout of one packed sequence.

    Attributes:
        lengths: tokens of each document, all >= 1, kept on the host so that no layer waits for a
            device.
        cu_seqlens: int32 [N+1], cumulative lengths, starting with 0 and ending with T.
        positions: int64 [T], position inside the document, restarting at 0.
        padding: the last document is padding: nobody reads its outputs, so attention leaves them 0.
        prefix: which tokens at the beginning of documents see each other in both directions; None: none do.
    """

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor
    positions: torch.Tensor
    padding: bool = False
    prefix: PrefixLayout | None = None

    def __post_init__(self) -> None:
        """Raises ValueError where kernels would read beside the documents (checked without waiting for a device)."""
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"document lengths must all be at least 1, got {self.lengths[:8]}")
        total, edges = sum(self.lengths), self.cu_seqlens
        ends_elsewhere = edges.is_cpu and edges.numel() > 0 and edges[-1].item() != total
        if total != self.positions.shape[0] or edges.shape[0] != len(self.lengths) + 1 or ends_elsewhere:
            raise ValueError(
                f"{len(self.lengths)} documents of {total} tokens do not match {self.positions.shape[0]} positions and "
                f"{edges.shape[0]} cu_seqlens"
            )

    @classmethod
    def of_checked(cls, lengths: tuple[int, ...], cu_seqlens: torch.Tensor, positions: torch.Tensor) -> SeqInfo:
        """Without padding, prefixes and the checks, for a caller that has made them for many layouts at once: one by
        one they take a tenth of the time of packing."""
        made, put = object.__new__(cls), object.__setattr__
        put(made, "lengths", lengths)
        put(made, "cu_seqlens", cu_seqlens)
        put(made, "positions", positions)
        put(made, "padding", False)
        put(made, "prefix", None)
        return made

    @property
    def num_tokens(self) -> int:
        return int(self.positions.shape[0])

    @property
    def max_length(self) -> int:
        return max(self.lengths)

    @classmethod
    def from_lengths(
        cls, lengths: list[int] | tuple[int, ...], device: torch.device | None = None, *, padding: bool = False
    ) -> SeqInfo:
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
            padding=padding,
        )

    def without_last(self) -> SeqInfo:
        """The layout before the last document, which must not be the only one; without `prefix`."""
        total = self.num_tokens - self.lengths[-1]
        return SeqInfo(self.lengths[:-1], self.cu_seqlens[:-1], self.positions[:total])

    def to(self, device: torch.device) -> SeqInfo:
        if self.positions.device == device:
            return self
        return SeqInfo(
            self.lengths,
            self.cu_seqlens.to(device, non_blocking=True),
            self.positions.to(device, non_blocking=True),
            self.padding,
            None if self.prefix is None else self.prefix.to(device),
        )


@dataclass(frozen=True, slots=True)
class PrefixLayout:
    """The two parts of documents whose beginning sees itself in both directions, as packed sequences of their own.

    Attributes:
        first: int64, where the tokens of the first parts are in the whole sequence.
        first_info: their layout, documents without a first part left out; None where no document has one.
        second: int64, where the tokens of the second parts are.
        second_info: their layout, documents without a second part left out; None where no document has one.
        keys: int64, where all tokens of the documents with a second part are; None where that is every document.
        keys_info: their layout, with as many documents as `second_info`.
        order: int64 [T], place of each token in first parts followed by second parts.
    """

    first: torch.Tensor
    first_info: SeqInfo | None
    second: torch.Tensor
    second_info: SeqInfo | None
    keys: torch.Tensor | None
    keys_info: SeqInfo | None
    order: torch.Tensor

    def to(self, device: torch.device) -> PrefixLayout:
        def moved(index: torch.Tensor) -> torch.Tensor:
            return index.to(device, non_blocking=True)

        infos = [info and info.to(device) for info in (self.first_info, self.second_info, self.keys_info)]
        keys = None if self.keys is None else moved(self.keys)
        return PrefixLayout(
            moved(self.first), infos[0], moved(self.second), infos[1], keys, infos[2], moved(self.order)
        )


IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch, the unit of work: the same whoever computes it.

    Attributes:
        index: its number j within the step's global batch; -1 for an empty one that only keeps the
            collectives in step (one padding document, every label ignored).
        decoder_ids: int64 [T], what the decoder reads.
        decoder_info: document layout of `decoder_ids`.
        labels: int64 [T], the target of each position, `IGNORED_LABEL` where there is none.
        encoder_ids: int64 [T_source], what the encoder reads; None for decoder-only models.
        encoder_info: its layout, with as many documents as `decoder_info`.
        dropout_key: 63-bit key made from (seed, step, j): everything random in the model follows it.
        target_tokens: labels that count.
        target_bytes: bytes of text that exactly those targets spell; 0 where its maker was not told what ids spell.
        digest: 48-bit digest of (j, ids, layout, labels); the sum over a step is the same for every
            number of ranks.
        row_tokens: decoder tokens of each row, one row after the other; None where all rows are full.
        document_kinds: number of the denoiser of each document, padding left out; None where there is one only.
    """

    index: int
    decoder_ids: torch.Tensor
    decoder_info: SeqInfo
    labels: torch.Tensor
    encoder_ids: torch.Tensor | None
    encoder_info: SeqInfo | None
    dropout_key: int
    target_tokens: int
    target_bytes: int
    digest: int
    row_tokens: tuple[int, ...] | None = None
    document_kinds: tuple[int, ...] | None = None

    def to(self, device: torch.device) -> Batch:
        if self.labels.device == device:
            return self
        return replace(
            self,
            decoder_ids=self.decoder_ids.to(device, non_blocking=True),
            decoder_info=self.decoder_info.to(device),
            labels=self.labels.to(device, non_blocking=True),
            encoder_ids=None if self.encoder_ids is None else self.encoder_ids.to(device, non_blocking=True),
            encoder_info=None if self.encoder_info is None else self.encoder_info.to(device),
        )
