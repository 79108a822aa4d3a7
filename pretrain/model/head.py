"""The output layer: hidden states -> loss sums or logits, with the matrix that it owns or shares.

The loss is computed inside this module's own forward, so that ZeRO-3 has the matrix gathered; a
tied one is the same Parameter object that the embedding holds.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from pretrain.config.schema import LossConfig
from pretrain.loss.fused import LossOptions, fused_linear_cross_entropy
from pretrain.loss.sums import LossSums
from pretrain.model.init import Constant, Initial
from pretrain.model.layers import Embedding


class Head(nn.Module):
    """Projection onto the vocabulary with the fused loss.

    Args:
        embedding: the token table; tied, its matrix is the projection, otherwise only its shape counts.
        bias: one more parameter per entry of the vocabulary, from 0 on.
        softcap: logits become cap * tanh(logit / cap).
    """

    def __init__(
        self,
        embedding: Embedding,
        initial: Initial,
        loss: LossConfig,
        *,
        tied: bool,
        bias: bool = False,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.weight = embedding.weight if tied else nn.Parameter(torch.empty_like(embedding.weight))
        self.bias = nn.Parameter(torch.empty(embedding.weight.shape[0])) if bias else None
        self.initial: dict[str, Initial] = {"weight": initial, "bias": Constant(0.0)}
        self.loss_options = LossOptions(loss.label_smoothing, loss.z_loss, loss.chunk_rows, softcap)

    def forward(self, hidden_TD: Float[Tensor, "T D"], labels_T: Int[Tensor, " T"] | None = None) -> LossSums | Tensor:
        """Loss sums of the labels; without labels the logits, at least fp32, [T, V]."""
        if labels_T is not None:
            return fused_linear_cross_entropy(hidden_TD, self.weight, labels_T, self.loss_options, bias_V=self.bias)
        logits_TV = functional.linear(hidden_TD, self.weight)
        logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
        if self.bias is not None:
            logits_TV = logits_TV + self.bias
        cap = self.loss_options.softcap
        return logits_TV if cap is None else cap * torch.tanh(logits_TV / cap)
