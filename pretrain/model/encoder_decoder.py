"""The 2017 Transformer on packed tensors: encoder, decoder with cross-attention, one shared embedding.

Takes a Batch whose source and target hold the same number of documents -> LossSums; target document i
sees source document i only. Decoding: encode the source once, then take new ids and a cache -> logits.
Source: Vaswani et al. 2017; the embedding is shared by source, target and output (section 3.4).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from jaxtyping import Float
from torch import Tensor, nn

from pretrain.config.schema import EncoderDecoderConfig, LossConfig
from pretrain.model.attention import attend, weight_dropout
from pretrain.model.cache import Cache, LayerCache
from pretrain.model.checkpointing import LayerStack
from pretrain.model.dropout import Dropout
from pretrain.model.encoder import BlockInitials, Encoder, PositionedEmbedding, SelfAttention
from pretrain.model.head import Head
from pretrain.model.init import Normal
from pretrain.model.layers import FeedForward, LayerNorm, Linear
from pretrain.model.pair import PairModel, Source
from pretrain.model.scaling import DeepNorm, scaled
from pretrain.sequence import SeqInfo


class CrossAttention(nn.Module):
    """Target tokens look at all of their source document; keys and values come from one matrix, keys first."""

    def __init__(self, config: EncoderDecoderConfig, initials: BlockInitials, site: int) -> None:
        super().__init__()
        self.dropout, self.site = config.attention_dropout, site
        width = config.width
        self.head_width = config.width_per_head
        self.backend = config.attention
        self.query = Linear(width, width, initials.attention, bias=True)
        self.key_value = Linear(width, 2 * width, initials.joined(1), bias=True)
        self.output = Linear(width, width, initials.deep_attention, bias=True)

    def forward(
        self, x_TD: Float[Tensor, "T D"], info: SeqInfo, source: Source, key: int, cache: LayerCache | None = None
    ) -> Float[Tensor, "T D"]:
        source_TD, source_info = source
        if cache is not None and cache.memory is not None:
            k_THK, v_THK = cache.memory
        else:
            k_THK, v_THK = self.key_value(source_TD).unflatten(-1, (2, -1, self.head_width)).unbind(1)
            if cache is not None:
                cache.memory = (k_THK, v_THK)
        out_THK = attend(
            self.query(x_TD).unflatten(-1, (-1, self.head_width)), k_THK, v_THK, q_info=info, k_info=source_info,
            causal=False, scale=1.0 / math.sqrt(self.head_width), backend=self.backend,
            dropout=weight_dropout(self.dropout, key, self.site, training=self.training),
        )  # fmt: skip
        return self.output(out_THK.flatten(1))


class CrossDecoderLayer(nn.Module):
    """Causal self-attention, cross-attention, feed-forward; each with dropout, residual sum and norm."""

    def __init__(self, config: EncoderDecoderConfig, sites: Iterator[int]) -> None:
        super().__init__()
        width, deep = config.width, DeepNorm.of(config, decoder=True)
        initials, self.keep = BlockInitials.xavier(width, config.feed_forward_width, deep.gain), deep.keep
        site = next(sites)
        self.attention = SelfAttention(config, initials.joined(2), initials.deep_attention, site, causal=True)
        self.attention_dropout = Dropout(config.dropout, site)
        self.attention_norm = LayerNorm(width, config.norm_eps)
        site = next(sites)
        self.cross = CrossAttention(config, initials, site)
        self.cross_dropout = Dropout(config.dropout, site)
        self.cross_norm = LayerNorm(width, config.norm_eps)
        self.mlp = FeedForward(width, config.feed_forward_width, initials.deep_mlp, initials.deep_mlp)
        self.mlp_dropout = Dropout(config.dropout, next(sites))
        self.mlp_norm = LayerNorm(width, config.norm_eps)

    def forward(
        self,
        x_TD: Float[Tensor, "T D"],
        info: SeqInfo,
        source: Source,
        key: int,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "T D"]:
        attended_TD = self.attention_dropout(self.attention(x_TD, info, key, cache), key)
        x_TD = self.attention_norm(scaled(x_TD, self.keep) + attended_TD)
        crossed_TD = self.cross_dropout(self.cross(x_TD, info, source, key, cache), key)
        x_TD = self.cross_norm(scaled(x_TD, self.keep) + crossed_TD)
        return self.mlp_norm(scaled(x_TD, self.keep) + self.mlp_dropout(self.mlp(x_TD), key))


class EncoderDecoder(PairModel):
    """The whole model with its loss."""

    def __init__(
        self, config: EncoderDecoderConfig, loss: LossConfig, *, activation_checkpointing: bool = False
    ) -> None:
        super().__init__(config.num_decoder_layers)
        self.config = config
        sites = itertools.count()
        self.embedding = PositionedEmbedding(config)
        self.encoder = Encoder(config, sites, activation_checkpointing=activation_checkpointing)
        self.embedding_dropout = Dropout(config.dropout, next(sites))
        self.layers = LayerStack(
            (CrossDecoderLayer(config, sites) for _ in range(config.num_decoder_layers)),
            checkpointed=activation_checkpointing,
        )
        self.head = Head(self.embedding.table, Normal(config.width**-0.5), loss, tied=config.tied_embeddings)

    def _encode(self, ids_T: Tensor, info: SeqInfo, key: int) -> Tensor:
        return self.encoder(self.embedding(ids_T, info), info, key)

    def _hidden(self, ids_T: Tensor, info: SeqInfo, source: Source, key: int, cache: Cache | None = None) -> Tensor:
        x_TD = self.embedding_dropout(self.embedding(ids_T, info), key)
        caches = [None] * len(self.layers) if cache is None else cache.layers
        return self.layers(x_TD, info, source, key, per_layer=caches)
