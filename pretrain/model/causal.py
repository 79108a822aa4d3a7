"""What every decoder-only model does around its layers: loss, logits, decoding with a cache.

A family gives `embedding … head` and `_hidden`, from ids and a layout to what the head reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from jaxtyping import Float, Int
from torch import Tensor, nn

from pretrain.errors import UserError
from pretrain.loss.sums import LossSums
from pretrain.model.cache import Cache
from pretrain.sequence import Batch, SeqInfo


class CausalModel(nn.Module, ABC):
    """Base of the decoder-only families; they have a `head`.

    Args:
        max_length: learned positions, where a family has them.
    """

    def __init__(self, num_layers: int, max_length: int | None = None) -> None:
        super().__init__()
        self.num_layers, self.max_length = num_layers, max_length

    @abstractmethod
    def _hidden(self, ids_T: Tensor, info: SeqInfo, key: int, cache: Cache | None = None) -> Tensor:
        """The normed output of the last layer, [T, D]; `key` is the dropout key."""

    def forward(self, batch: Batch) -> LossSums:
        """Sums of the loss over the batch's labels."""
        return self.head(self.hidden(batch), batch.labels)

    def hidden(self, batch: Batch) -> Float[Tensor, "T D"]:
        """What the head reads: the normed output of the last layer."""
        return self._hidden(batch.decoder_ids, batch.decoder_info, batch.dropout_key)

    def logits(self, batch: Batch) -> Float[Tensor, "T V"]:
        """Logits of every position, at least fp32."""
        return self.head(self.hidden(batch))

    def new_cache(self, capacity: int, num_sequences: int = 1) -> Cache:
        """An empty cache for sequences of at most `capacity` tokens each.

        Raises:
            UserError: the model has fewer positions.
        """
        if self.max_length is not None and capacity > self.max_length:
            raise UserError(
                f"{capacity} tokens of prompt and new text are more than model.max_length={self.max_length}. "
                "Every position needs its learned vector. Give a shorter prompt or a smaller --max-tokens."
            )
        return Cache.empty(self.num_layers, capacity, num_sequences)

    def decode(
        self, ids_T: Int[Tensor, " T"], cache: Cache, counts: Sequence[int] | None = None
    ) -> Float[Tensor, "B V"]:
        """Appends ids to the cached sequences; logits of what follows the last one of each.

        Args:
            ids_T: of one sequence after the other.
            counts: how many each gets, at least one; equally many if not given.

        Raises:
            ValueError: the cache is full.
        """
        info = cache.next_info(counts or ids_T.shape[0], ids_T.device)
        return self.head(self._hidden(ids_T, info, 0, cache)[info.cu_seqlens[1:] - 1])
