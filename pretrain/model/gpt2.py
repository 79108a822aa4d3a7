"""GPT-2: decoder-only, pre-norm LayerNorm, learned positions, GELU (tanh form), biases everywhere.

Takes a Batch of packed documents -> LossSums; documents do not see each other, and positions restart in
each. Decoding takes new ids and a cache -> logits of the last one, up to `max_length` tokens.
Source: Radford et al. 2019 and its code; initial weights N(0, init_std), those that write to the
residual stream / sqrt(2 layers).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from jaxtyping import Float
from torch import Tensor, nn

from pretrain.config.schema import GPT2Config, LossConfig
from pretrain.model.cache import Cache, LayerCache
from pretrain.model.causal import CausalModel
from pretrain.model.checkpointing import LayerStack
from pretrain.model.dropout import Dropout
from pretrain.model.encoder import SelfAttention
from pretrain.model.head import Head
from pretrain.model.layers import Embedding, FeedForward, LayerNorm
from pretrain.model.positions import LearnedPositions
from pretrain.model.scaling import Scaling, scaled
from pretrain.sequence import SeqInfo


class GPT2Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPT2Config, scaling: Scaling, sites: Iterator[int]) -> None:
        super().__init__()
        inner, outer, self.branch = scaling.inner, scaling.outer, scaling.branch
        self.attention_norm = LayerNorm(config.width, config.norm_eps)
        site = next(sites)
        self.attention = SelfAttention(
            config, inner, outer, site, causal=True, scale=scaling.of_scores(config.width_per_head)
        )
        self.attention_dropout = Dropout(config.dropout, site)
        self.mlp_norm = LayerNorm(config.width, config.norm_eps)
        self.mlp = FeedForward(config.width, config.feed_forward_width, inner, outer, activation="gelu_tanh")
        self.mlp_dropout = Dropout(config.dropout, next(sites))

    def forward(
        self, x_TD: Float[Tensor, "T D"], info: SeqInfo, key: int, cache: LayerCache | None = None
    ) -> Float[Tensor, "T D"]:
        attended_TD = self.attention_dropout(self.attention(self.attention_norm(x_TD), info, key, cache), key)
        x_TD = x_TD + scaled(attended_TD, self.branch)
        return x_TD + scaled(self.mlp_dropout(self.mlp(self.mlp_norm(x_TD)), key), self.branch)


class GPT2(CausalModel):
    """The whole model with its loss."""

    def __init__(self, config: GPT2Config, loss: LossConfig, *, activation_checkpointing: bool = False) -> None:
        super().__init__(config.num_layers, config.max_length)
        self.config = config
        sites = itertools.count()
        scaling = Scaling.of(config)
        self.embedding = Embedding(config.vocabulary_size, config.width, config.init_std)
        self.positions = LearnedPositions(config.max_length, config.width, scaling.table)
        self.embedding_dropout = Dropout(config.dropout, next(sites))
        self.layers = LayerStack(
            (GPT2Layer(config, scaling, sites) for _ in range(config.num_layers)), checkpointed=activation_checkpointing
        )
        scaling.slow_down(self.layers)
        self.norm = LayerNorm(config.width, config.norm_eps)
        self.head = Head(self.embedding, scaling.table, loss, tied=config.tied_embeddings)
        self.output_scale = scaling.output

    def _hidden(self, ids_T: Tensor, info: SeqInfo, key: int, cache: Cache | None = None) -> Tensor:
        x_TD = self.embedding_dropout(self.embedding(ids_T) + self.positions(info.positions), key)
        caches = [None] * len(self.layers) if cache is None else cache.layers
        return scaled(self.norm(self.layers(x_TD, info, key, per_layer=caches)), self.output_scale)
