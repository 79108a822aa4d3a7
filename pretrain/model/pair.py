"""What every encoder-decoder does around its stacks: loss, logits, encoding once, decoding with a cache.

A family gives `embedding … head`, `_encode` and `_hidden`, from ids and layouts to what the head reads.
Target document i sees source document i only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from jaxtyping import Float, Int
from torch import Tensor, nn

from pretrain.loss.sums import LossSums
from pretrain.model.cache import Cache, one_document
from pretrain.sequence import Batch, SeqInfo

Source = tuple[Tensor, SeqInfo]
"""Encoded source [T_source, D] and its layout."""


class PairModel(nn.Module, ABC):
    """Base of the encoder-decoder families; they have a `head`."""

    def __init__(self, num_decoder_layers: int) -> None:
        super().__init__()
        self.num_decoder_layers = num_decoder_layers

    @abstractmethod
    def _encode(self, ids_T: Tensor, info: SeqInfo, key: int) -> Tensor:
        """Hidden states of the sources, [T_source, D]; `key` is the dropout key."""

    @abstractmethod
    def _hidden(self, ids_T: Tensor, info: SeqInfo, source: Source, key: int, cache: Cache | None = None) -> Tensor:
        """What the head reads of the targets, [T, D]."""

    def forward(self, batch: Batch) -> LossSums:
        """Sums of the loss over the batch's labels.

        Raises:
            ValueError: the batch has no source.
        """
        return self.head(self.hidden(batch), batch.labels)

    def hidden(self, batch: Batch) -> Float[Tensor, "T D"]:
        """What the head reads: the output of the decoder."""
        if batch.encoder_ids is None or batch.encoder_info is None:
            raise ValueError("an encoder-decoder needs batches with encoder_ids and encoder_info")
        key = batch.dropout_key
        source = (self._encode(batch.encoder_ids, batch.encoder_info, key), batch.encoder_info)
        return self._hidden(batch.decoder_ids, batch.decoder_info, source, key)

    def logits(self, batch: Batch) -> Float[Tensor, "T V"]:
        """Logits of every target position, at least fp32."""
        return self.head(self.hidden(batch))

    def encode(self, ids_T: Int[Tensor, " T"], info: SeqInfo | None = None) -> Float[Tensor, "T D"]:
        """Hidden states of source documents (of one, without a layout), for `new_cache`."""
        return self._encode(ids_T, info or one_document(0, ids_T.shape[0], ids_T.device), 0)

    def new_cache(self, capacity: int, encoded_TD: Float[Tensor, "T D"], info: SeqInfo | None = None) -> Cache:
        """An empty cache for targets of at most `capacity` tokens each, one per encoded source."""
        info = info or one_document(0, encoded_TD.shape[0], encoded_TD.device)
        cache = Cache.empty(self.num_decoder_layers, capacity, len(info.lengths))
        cache.source = (encoded_TD, info)
        return cache

    def decode(
        self, ids_T: Int[Tensor, " T"], cache: Cache, counts: Sequence[int] | None = None
    ) -> Float[Tensor, "B V"]:
        """Appends ids to the cached targets; logits of what follows the last one of each.

        Args:
            ids_T: of one target after the other.
            counts: how many each gets, at least one; equally many if not given.

        Raises:
            ValueError: the cache is full, or was made without a source.
        """
        if cache.source is None:
            raise ValueError("this cache has no source: make it with new_cache(capacity, encode(ids))")
        info = cache.next_info(counts or ids_T.shape[0], ids_T.device)
        hidden_TD = self._hidden(ids_T, info, cache.source, 0, cache)
        return self.head(hidden_TD[info.cu_seqlens[1:] - 1])
