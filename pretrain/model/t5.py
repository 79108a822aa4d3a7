"""T5 v1.0 and v1.1 on packed tensors: pre-norm stacks, relative biases, no positions in the embedding.

Takes a Batch whose source and target hold the same number of documents -> LossSums; target document i
sees source document i only. Decoding: encode the source once, then take new ids and a cache -> logits.
No biases in projections, RMSNorm, scores not scaled (that is in the initial queries). v1.0: ReLU and a
tied output scaled by D^-0.5; v1.1: gated GELU and an untied output.
Sources: Raffel et al. 2020, section 2.1; Shazeer 2020; initial weights as in mesh_tensorflow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from jaxtyping import Float
from torch import Tensor, nn

from pretrain.config.schema import LossConfig, T5Config
from pretrain.model.attention import RelativeBias, attend, weight_dropout
from pretrain.model.cache import Cache, LayerCache
from pretrain.model.checkpointing import LayerStack
from pretrain.model.dropout import Dropout
from pretrain.model.head import Head
from pretrain.model.init import Normal
from pretrain.model.layers import Embedding, FeedForward, GatedGelu, Linear, RMSNorm
from pretrain.model.pair import PairModel, Source
from pretrain.model.positions import RelativePositionBias
from pretrain.sequence import SeqInfo


class T5Attention(nn.Module):
    """Self-attention, or with a source attention to it; keys and values come from one matrix, keys first."""

    def __init__(self, config: T5Config, site: int, *, causal: bool) -> None:
        super().__init__()
        self.dropout, self.site = config.attention_dropout, site
        self.head_width = config.width_per_head
        self.causal = causal
        self.backend = config.attention
        inside = config.num_heads * self.head_width
        self.query = Linear(config.width, inside, Normal((config.width * self.head_width) ** -0.5))
        self.key_value = Linear(config.width, 2 * inside, Normal(config.width**-0.5))
        self.output = Linear(inside, config.width, Normal(inside**-0.5))

    def forward(
        self,
        x_TD: Float[Tensor, "T D"],
        info: SeqInfo,
        key: int,
        *,
        bias: RelativeBias | None = None,
        source: Source | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "T D"]:
        if source is None:
            k_THK, v_THK, k_info = (*self._keys_values(x_TD), info)
            if cache is not None:
                k_THK, v_THK, k_info = cache.append(k_THK, v_THK)
        else:
            source_TD, k_info = source
            k_THK, v_THK = cache.memory if cache is not None and cache.memory else self._keys_values(source_TD)
            if cache is not None:
                cache.memory = (k_THK, v_THK)
        out_THK = attend(
            self.query(x_TD).unflatten(-1, (-1, self.head_width)), k_THK, v_THK, q_info=info, k_info=k_info,
            causal=self.causal, scale=1.0, bias=bias, backend=self.backend,
            dropout=weight_dropout(self.dropout, key, self.site, training=self.training),
        )  # fmt: skip
        return self.output(out_THK.flatten(1))

    def _keys_values(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        k_THK, v_THK = self.key_value(x_TD).unflatten(-1, (2, -1, self.head_width)).unbind(1)
        return k_THK, v_THK


class T5Layer(nn.Module):
    """x + f(norm(x)) for self-attention, in the decoder cross-attention, and feed-forward."""

    def __init__(self, config: T5Config, sites: Iterator[int], *, decoder: bool) -> None:
        super().__init__()
        width, hidden = config.width, config.feed_forward_width
        inner, outer = Normal(width**-0.5), Normal(hidden**-0.5)
        self.attention_norm = RMSNorm(width, config.norm_eps)
        site = next(sites)
        self.attention = T5Attention(config, site, causal=decoder)
        self.attention_dropout = Dropout(config.dropout, site)
        if decoder:
            self.cross_norm = RMSNorm(width, config.norm_eps)
            site = next(sites)
            self.cross = T5Attention(config, site, causal=False)
            self.cross_dropout = Dropout(config.dropout, site)
        self.mlp_norm = RMSNorm(width, config.norm_eps)
        self.mlp = (
            GatedGelu(width, hidden, inner, outer)
            if config.feed_forward == "gated_gelu"
            else FeedForward(width, hidden, inner, outer, activation="relu", bias=False)
        )
        self.mlp_dropout = Dropout(config.dropout, next(sites))

    def forward(
        self,
        x_TD: Float[Tensor, "T D"],
        info: SeqInfo,
        source: Source | None,
        bias: RelativeBias,
        key: int,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "T D"]:
        attended_TD = self.attention(self.attention_norm(x_TD), info, key, bias=bias, cache=cache)
        x_TD = x_TD + self.attention_dropout(attended_TD, key)
        if source is not None:
            crossed_TD = self.cross(self.cross_norm(x_TD), info, key, source=source, cache=cache)
            x_TD = x_TD + self.cross_dropout(crossed_TD, key)
        return x_TD + self.mlp_dropout(self.mlp(self.mlp_norm(x_TD)), key)


class T5Stack(nn.Module):
    """The layers of one side above the embedding, with their relative bias and the last norm."""

    def __init__(
        self, config: T5Config, sites: Iterator[int], *, decoder: bool, activation_checkpointing: bool
    ) -> None:
        super().__init__()
        num_layers = config.num_decoder_layers if decoder else config.num_encoder_layers
        self.embedding_dropout = Dropout(config.dropout, next(sites))
        self.bias = RelativePositionBias(
            config.num_heads,
            num_buckets=config.num_buckets,
            max_distance=config.max_distance,
            bidirectional=not decoder,
            initial=Normal(config.width**-0.5),
        )
        self.layers = LayerStack(
            (T5Layer(config, sites, decoder=decoder) for _ in range(num_layers)), checkpointed=activation_checkpointing
        )
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.norm_dropout = Dropout(config.dropout, next(sites))

    def forward(
        self,
        x_TD: Float[Tensor, "T D"],
        info: SeqInfo,
        key: int,
        source: Source | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "T D"]:
        longest = info.max_length + (0 if cache is None else cache.length)
        bias = self.bias.rule(longest, x_TD.device)
        caches = [None] * len(self.layers) if cache is None else cache.layers
        x_TD = self.layers(self.embedding_dropout(x_TD, key), info, source, bias, key, per_layer=caches)
        return self.norm_dropout(self.norm(x_TD), key)


class T5(PairModel):
    """The whole model with its loss; one token table for both sides."""

    def __init__(self, config: T5Config, loss: LossConfig, *, activation_checkpointing: bool = False) -> None:
        super().__init__(config.num_decoder_layers)
        self.config = config
        sites = itertools.count()
        self.embedding = Embedding(config.vocabulary_size, config.width, 1.0)
        self.encoder = T5Stack(config, sites, decoder=False, activation_checkpointing=activation_checkpointing)
        self.decoder = T5Stack(config, sites, decoder=True, activation_checkpointing=activation_checkpointing)
        # The tied table has rows of variance 1, so what it reads is scaled; an untied one starts that small.
        self.output_scale = config.width**-0.5 if config.tied_embeddings else 1.0
        self.head = Head(self.embedding, Normal(config.width**-0.5), loss, tied=config.tied_embeddings)

    def _encode(self, ids_T: Tensor, info: SeqInfo, key: int) -> Tensor:
        return self.encoder(self.embedding(ids_T), info, key)

    def _hidden(self, ids_T: Tensor, info: SeqInfo, source: Source, key: int, cache: Cache | None = None) -> Tensor:
        """The normed output of the decoder, scaled where the output is tied."""
        return self.decoder(self.embedding(ids_T), info, key, source, cache) * self.output_scale
