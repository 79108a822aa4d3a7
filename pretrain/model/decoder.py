"""Decoder-only Transformer: pre-norm RMSNorm, grouped-query attention, SwiGLU; rotary or other positions.

Takes a Batch of packed documents -> LossSums; documents do not see each other. Decoding takes new ids
and a cache -> logits of the last one. Same computation as Llama, with qk_norm as Qwen3.
Sources: Touvron et al. 2023; Ainslie et al. 2023 (GQA); Henry et al. 2020 (QK norm); initial weights
N(0, init_std), those that write to the residual stream / sqrt(2 layers) (GPT-2), or as `scaling` says.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from jaxtyping import Float
from torch import Tensor, nn

from pretrain.config.schema import DecoderConfig, LossConfig, MoEConfig
from pretrain.model.attention import RelativeBias, attend, weight_dropout
from pretrain.model.cache import Cache, LayerCache
from pretrain.model.causal import CausalModel
from pretrain.model.checkpointing import LayerStack
from pretrain.model.dropout import Dropout
from pretrain.model.head import Head
from pretrain.model.layers import Embedding, Linear, RMSNorm, SwiGLU
from pretrain.model.positions import LearnedPositions, Rotary, alibi_bias, rotary_angles, rotate
from pretrain.model.scaling import Scaling, scaled
from pretrain.sequence import SeqInfo

Places = tuple[Rotary | None, RelativeBias | None]
"""What tells the attention where tokens stand: angles, or a bias by distance, or neither (learned vectors)."""


class DecoderAttention(nn.Module):
    """Causal self-attention; queries, keys and values come from one matrix, in this order."""

    def __init__(self, config: DecoderConfig | MoEConfig, scaling: Scaling, site: int) -> None:
        super().__init__()
        self.dropout, self.site = config.attention_dropout, site
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads or config.num_heads
        self.head_width = config.width_per_head
        self.backend = config.attention
        self.scale = scaling.of_scores(self.head_width)
        self.rotate = rotate
        all_heads = self.num_heads + 2 * self.num_kv_heads
        self.qkv = Linear(config.width, all_heads * self.head_width, scaling.inner)
        self.query_norm = RMSNorm(self.head_width, config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(self.head_width, config.norm_eps) if config.qk_norm else None
        self.output = Linear(self.num_heads * self.head_width, config.width, scaling.outer)

    def forward(
        self, x_TD: Float[Tensor, "T D"], info: SeqInfo, places: Places, key: int, cache: LayerCache | None = None
    ) -> Float[Tensor, "T D"]:
        heads = self.qkv(x_TD).unflatten(-1, (-1, self.head_width))
        rotary, bias = places
        if rotary is not None and (self.query_norm is None or self.key_norm is None):
            # One rotation for queries and keys: they stand side by side.
            qk, v_TGK = heads.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
            q_THK, k_TGK = self.rotate(qk, rotary).split((self.num_heads, self.num_kv_heads), dim=1)
        else:
            q_THK, k_TGK, v_TGK = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
            if self.query_norm is not None and self.key_norm is not None:
                q_THK, k_TGK = self.query_norm(q_THK), self.key_norm(k_TGK)
            if rotary is not None:
                q_THK, k_TGK = self.rotate(q_THK, rotary), self.rotate(k_TGK, rotary)
        k_info = info
        if cache is not None:
            k_TGK, v_TGK, k_info = cache.append(k_TGK, v_TGK)
        out_THK = attend(
            q_THK, k_TGK, v_TGK, q_info=info, k_info=k_info, causal=True, scale=self.scale, bias=bias,
            dropout=weight_dropout(self.dropout, key, self.site, training=self.training), backend=self.backend,
        )  # fmt: skip
        return self.output(out_THK.flatten(1))


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), the sums scaled where the config says so."""

    def __init__(self, config: DecoderConfig, scaling: Scaling, sites: Iterator[int]) -> None:
        super().__init__()
        self.branch = scaling.branch
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        site = next(sites)
        self.attention = DecoderAttention(config, scaling, site)
        self.attention_dropout = Dropout(config.dropout, site)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = SwiGLU(config.width, config.feed_forward_width, scaling.inner, scaling.outer)
        self.mlp_dropout = Dropout(config.dropout, next(sites))

    def forward(
        self,
        x_TD: Float[Tensor, "T D"],
        info: SeqInfo,
        places: Places,
        key: int,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "T D"]:
        attended_TD = self.attention_dropout(self.attention(self.attention_norm(x_TD), info, places, key, cache), key)
        x_TD = x_TD + scaled(attended_TD, self.branch)
        return x_TD + scaled(self.mlp_dropout(self.mlp(self.mlp_norm(x_TD)), key), self.branch)


class Decoder(CausalModel):
    """The whole model with its loss."""

    def __init__(self, config: DecoderConfig, loss: LossConfig, *, activation_checkpointing: bool = False) -> None:
        super().__init__(config.num_layers, config.max_length)
        self.config = config
        sites = itertools.count()
        scaling = Scaling.of(config)
        self.embedding = Embedding(config.vocabulary_size, config.width, config.init_std)
        self.positions = (
            LearnedPositions(config.max_length, config.width, scaling.table) if config.max_length is not None else None
        )
        self.embedding_dropout = Dropout(config.dropout, next(sites))
        self.layers = LayerStack(
            (DecoderLayer(config, scaling, sites) for _ in range(config.num_layers)),
            checkpointed=activation_checkpointing,
        )
        scaling.slow_down(self.layers)
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = Head(self.embedding, scaling.table, loss, tied=config.tied_embeddings)
        self.output_scale = scaling.output

    def _hidden(self, ids_T: Tensor, info: SeqInfo, key: int, cache: Cache | None = None) -> Tensor:
        x_TD = self.embedding(ids_T)
        if self.positions is not None:
            x_TD = x_TD + self.positions(info.positions)
        x_TD = self.embedding_dropout(x_TD, key)
        caches = [None] * len(self.layers) if cache is None else cache.layers
        x_TD = self.layers(x_TD, info, self._places(info, x_TD), key, per_layer=caches)
        return scaled(self.norm(x_TD), self.output_scale)

    def _places(self, info: SeqInfo, x_TD: Tensor) -> Places:
        config = self.config
        if config.positions == "alibi":
            return None, alibi_bias(config.num_heads, x_TD.device)
        if config.positions == "learned":
            return None, None
        angles = rotary_angles(
            info.positions, config.width_per_head, config.rope_theta, x_TD.dtype, config.rope_scaling
        )
        return angles, None
