"""Encoder of the 2017 Transformer, and what others share with it: attention with biases, the post-norm layer.

Takes packed source documents -> their hidden states; attention sees the whole own document.
Post-norm: norm(x + dropout(sublayer(x))), biases everywhere, ReLU, xavier.
Source: Vaswani et al. 2017, sections 3.1-3.5 and 5.4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor, nn

from pretrain.config.schema import EncoderConfig, EncoderDecoderConfig, ModelConfig
from pretrain.model.attention import attend, weight_dropout
from pretrain.model.cache import LayerCache
from pretrain.model.checkpointing import LayerStack
from pretrain.model.dropout import Dropout
from pretrain.model.init import Initial, Normal, Stacked, Xavier
from pretrain.model.layers import Activation, Embedding, FeedForward, LayerNorm, Linear
from pretrain.model.positions import sinusoids
from pretrain.model.scaling import DeepNorm, scaled
from pretrain.sequence import SeqInfo


class SelfAttention(nn.Module):
    """Attention inside a document; queries, keys and values come from one matrix, in this order.

    Args:
        site: which dropout of the model is that of its weights.
        scale: factor of the scores; none means the head's width to the power -1/2.
    """

    def __init__(
        self,
        config: ModelConfig,
        inner: Initial,
        outer: Initial,
        site: int,
        *,
        causal: bool,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.dropout, self.site = config.attention_dropout, site
        width = config.width
        self.head_width = config.width_per_head
        self.scale = scale or 1.0 / math.sqrt(self.head_width)
        self.causal = causal
        self.backend = config.attention
        self.qkv = Linear(width, 3 * width, inner, bias=True)
        self.output = Linear(width, width, outer, bias=True)

    def forward(
        self, x_TD: Float[Tensor, "T D"], info: SeqInfo, key: int, cache: LayerCache | None = None
    ) -> Float[Tensor, "T D"]:
        q_THK, k_THK, v_THK = self.qkv(x_TD).unflatten(-1, (3, -1, self.head_width)).unbind(1)
        k_info = info
        if cache is not None:
            k_THK, v_THK, k_info = cache.append(k_THK, v_THK)
        out_THK = attend(
            q_THK, k_THK, v_THK, q_info=info, k_info=k_info, causal=self.causal, scale=self.scale,
            dropout=weight_dropout(self.dropout, key, self.site, training=self.training), backend=self.backend,
        )  # fmt: skip
        return self.output(out_THK.flatten(1))


@dataclass(frozen=True, slots=True)
class BlockInitials:
    """How the weights of a post-norm layer start: matrices from the stream as they are, others by the gain."""

    attention: Normal | Xavier
    deep_attention: Normal | Xavier
    deep_mlp: Normal | Xavier

    @classmethod
    def xavier(cls, width: int, hidden: int, gain: float) -> BlockInitials:
        return cls(Xavier(width, width), Xavier(width, width, gain), Xavier(width, hidden, gain))

    @classmethod
    def normal(cls, std: float, gain: float) -> BlockInitials:
        return cls(Normal(std), Normal(std * gain), Normal(std * gain))

    def joined(self, scores: int) -> Initial:
        """Of one matrix that gives queries and keys (`scores` of them) and values."""
        if self.attention == self.deep_attention:
            return self.attention
        return Stacked((*[self.attention] * scores, self.deep_attention))


class PositionedEmbedding(nn.Module):
    """sqrt(D) times the embedding, plus sinusoids, summed in fp32; one table serves source and target."""

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.width = config.width
        # Unit variance after the factor sqrt(D): the scale of the sinusoids.
        self.table = Embedding(config.vocabulary_size, config.width, config.width**-0.5)

    def forward(self, ids_T: Int[Tensor, " T"], info: SeqInfo) -> Float[Tensor, "T D"]:
        x_TD = self.table(ids_T)
        return (sinusoids(info.positions, self.width) + math.sqrt(self.width) * x_TD).to(x_TD.dtype)


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward, each followed by dropout, the residual sum and a norm."""

    def __init__(
        self,
        config: EncoderDecoderConfig | EncoderConfig,
        sites: Iterator[int],
        initials: BlockInitials,
        activation: Activation,
    ) -> None:
        super().__init__()
        width, self.keep = config.width, DeepNorm.of(config).keep
        site = next(sites)
        self.attention = SelfAttention(config, initials.joined(2), initials.deep_attention, site, causal=False)
        self.attention_dropout = Dropout(config.dropout, site)
        self.attention_norm = LayerNorm(width, config.norm_eps)
        deep = initials.deep_mlp
        self.mlp = FeedForward(width, config.feed_forward_width, deep, deep, activation=activation)
        self.mlp_dropout = Dropout(config.dropout, next(sites))
        self.mlp_norm = LayerNorm(width, config.norm_eps)

    def forward(self, x_TD: Float[Tensor, "T D"], info: SeqInfo, key: int, _: None = None) -> Float[Tensor, "T D"]:
        kept_TD = scaled(x_TD, self.keep)
        x_TD = self.attention_norm(kept_TD + self.attention_dropout(self.attention(x_TD, info, key), key))
        return self.mlp_norm(scaled(x_TD, self.keep) + self.mlp_dropout(self.mlp(x_TD), key))


class Encoder(nn.Module):
    """The layers above the embedding."""

    def __init__(self, config: EncoderDecoderConfig, sites: Iterator[int], *, activation_checkpointing: bool) -> None:
        super().__init__()
        self.embedding_dropout = Dropout(config.dropout, next(sites))
        width = config.width
        initials = BlockInitials.xavier(width, config.feed_forward_width, DeepNorm.of(config).gain)
        self.layers = LayerStack(
            (EncoderLayer(config, sites, initials, "relu") for _ in range(config.num_encoder_layers)),
            checkpointed=activation_checkpointing,
        )

    def forward(self, x_TD: Float[Tensor, "T D"], info: SeqInfo, key: int) -> Float[Tensor, "T D"]:
        x_TD = self.embedding_dropout(x_TD, key)
        return self.layers(x_TD, info, key, per_layer=[None] * len(self.layers))
