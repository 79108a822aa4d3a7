"""Biases of the attention scores by relative place: T5's trained buckets and ALiBi's fixed slopes.

Both give a `RelativeBias`, a formula that backends evaluate for the distances they need; no [L, L]
matrix exists. Relative place is key - query. Sources: Raffel et al. 2020 and the T5 code (buckets);
Press et al. 2022 and its code (slopes).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from pretrain.model.attention.rules import RelativeBias
from pretrain.model.init import Initial, Normal


@torch.no_grad()
def relative_buckets(
    relative_R: Int[Tensor, " R"], *, num_buckets: int, max_distance: int, bidirectional: bool
) -> Int[Tensor, " R"]:
    """T5's bucket of each relative place.

    Half of the buckets hold one distance each; the others grow logarithmically up to `max_distance`,
    beyond which all share the last. Bidirectional: keys after the query have a second set of buckets,
    one-sided: they share bucket 0 with the query's own place.
    """
    offset_R = torch.zeros_like(relative_R)
    if bidirectional:
        num_buckets //= 2
        offset_R = (relative_R > 0) * num_buckets
        distance_R = relative_R.abs()
    else:
        distance_R = (-relative_R).clamp(min=0)
    exact = num_buckets // 2
    # In fp32 and in this order, as T5 does: another order moves edges of buckets.
    share_R = torch.log(distance_R.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far_R = (exact + (share_R * (num_buckets - exact)).to(torch.int64)).clamp(max=num_buckets - 1)
    return offset_R + torch.where(distance_R < exact, distance_R, far_R)


class RelativePositionBias(nn.Module):
    """T5's table of one value per bucket and head; the encoder's is bidirectional, the decoder's is not."""

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool,
        initial: Initial | None = None,
    ) -> None:
        super().__init__()
        self.num_buckets, self.max_distance, self.bidirectional = num_buckets, max_distance, bidirectional
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads))
        self.initial: dict[str, Initial] = {"weight": initial or Normal(1.0)}

    def rule(self, longest: int, device: torch.device) -> RelativeBias:
        """The bias to pass to `attend` in every layer of a stack, for documents of at most `longest` tokens."""
        reach = longest - 1

        def values(relative_R: Tensor, by_place_RH: Tensor) -> Tensor:
            # An embedding's gradient is summed in a fixed order, that of plain indexing is not.
            return functional.embedding(relative_R.clamp(-reach, reach) + reach, by_place_RH).T

        return RelativeBias(values, (self(longest, device),))

    def forward(self, longest: int, device: torch.device) -> Float[Tensor, "R H"]:
        """The value at each relative place from 1 - longest to longest - 1.

        The table is read here and not in the attention: under ZeRO-3 it is whole only inside this call. A tensor
        and nothing around it, because DeepSpeed looks for tensors in what a module returns.
        """
        reach = longest - 1
        buckets_R = relative_buckets(
            torch.arange(-reach, longest, device=device),
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        # fp32 at least, so that the gradients of all pairs at one distance are not summed in bf16.
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        return functional.embedding(buckets_R, self.weight).to(wide)


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """2^(-8 i / H) for i = 1 … H where H is a power of two; otherwise those of the power below, and every
    second one of the power above."""
    below = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / below) for i in range(below)]
    above = [2.0 ** (-4.0 * (i + 1) / below) for i in range(0, 2 * below, 2)]
    return tuple((slopes + above)[:num_heads])


def alibi_bias(num_heads: int, device: torch.device | None = None) -> RelativeBias:
    """-slope * |key place - query place|, not trained."""
    return RelativeBias(_alibi_values, (torch.tensor(alibi_slopes(num_heads), device=device),))


def _alibi_values(relative_R: Tensor, slopes_H: Tensor) -> Float[Tensor, "H R"]:
    return -slopes_H[:, None] * relative_R.abs()
