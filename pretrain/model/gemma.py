"""Gemma 2 and 3: decoder-only, norms before and after each block, most layers with a sliding window.

Takes a Batch of packed documents -> LossSums; documents do not see each other. Decoding takes new ids
and a cache -> logits of the last one. Norms multiply by 1 + weight, embeddings by sqrt(D), the
feed-forward block is a gated GELU. Gemma 2 caps scores and logits, Gemma 3 norms queries and keys and turns
them by other angles where there is no window.
Sources: Gemma Team 2024 (2408.00118) and 2025 (2503.19786) and their code; initial weights N(0, init_std).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pretrain.config.schema import GemmaConfig, LossConfig
from pretrain.model.attention import attend, weight_dropout
from pretrain.model.cache import Cache, LayerCache
from pretrain.model.causal import CausalModel
from pretrain.model.checkpointing import LayerStack
from pretrain.model.dropout import Dropout
from pretrain.model.head import Head
from pretrain.model.init import Normal
from pretrain.model.layers import Embedding, GatedGelu, Linear, RMSNorm
from pretrain.model.positions import Rotary, rotary_angles, rotate
from pretrain.sequence import SeqInfo


def has_window(config: GemmaConfig, layer: int) -> bool:
    """Whether a layer, counted from 0, sees a window only."""
    return (layer + 1) % config.full_every != 0


class GemmaAttention(nn.Module):
    """Causal self-attention; queries, keys and values come from one matrix, in this order."""

    def __init__(self, config: GemmaConfig, site: int, *, window: int | None) -> None:
        super().__init__()
        self.dropout, self.site = config.attention_dropout, site
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads or config.num_heads
        self.head_width = config.width_per_head
        self.scale = 1.0 / math.sqrt(config.query_scale or self.head_width)
        self.rotate = rotate
        self.window, self.softcap, self.backend = window, config.attention_softcap, config.attention
        initial = Normal(config.init_std)
        self.qkv = Linear(config.width, (self.num_heads + 2 * self.num_kv_heads) * self.head_width, initial)
        self.output = Linear(self.num_heads * self.head_width, config.width, initial)
        self.query_norm = RMSNorm(self.head_width, config.norm_eps, around_one=True) if config.qk_norm else None
        self.key_norm = RMSNorm(self.head_width, config.norm_eps, around_one=True) if config.qk_norm else None

    def forward(
        self, x_TD: Float[Tensor, "T D"], info: SeqInfo, rotary: Rotary, key: int, cache: LayerCache | None = None
    ) -> Float[Tensor, "T D"]:
        heads = self.qkv(x_TD).unflatten(-1, (-1, self.head_width))
        q_THK, k_TGK, v_TGK = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            q_THK, k_TGK = self.query_norm(q_THK), self.key_norm(k_TGK)
        q_THK, k_TGK, k_info = self.rotate(q_THK, rotary), self.rotate(k_TGK, rotary), info
        if cache is not None:
            k_TGK, v_TGK, k_info = cache.append(k_TGK, v_TGK)
        out_THK = attend(
            q_THK, k_TGK, v_TGK, q_info=info, k_info=k_info, causal=True, scale=self.scale, window=self.window,
            softcap=self.softcap, backend=self.backend,
            dropout=weight_dropout(self.dropout, key, self.site, training=self.training),
        )  # fmt: skip
        return self.output(out_THK.flatten(1))


class GemmaLayer(nn.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config: GemmaConfig, sites: Iterator[int], *, window: int | None) -> None:
        super().__init__()
        width, eps, initial = config.width, config.norm_eps, Normal(config.init_std)
        self.attention_norm = RMSNorm(width, eps, around_one=True)
        site = next(sites)
        self.attention = GemmaAttention(config, site, window=window)
        self.attention_out_norm = RMSNorm(width, eps, around_one=True)
        self.attention_dropout = Dropout(config.dropout, site)
        self.mlp_norm = RMSNorm(width, eps, around_one=True)
        self.mlp = GatedGelu(width, config.feed_forward_width, initial, initial)
        self.mlp_out_norm = RMSNorm(width, eps, around_one=True)
        self.mlp_dropout = Dropout(config.dropout, next(sites))

    def forward(
        self,
        x_TD: Float[Tensor, "T D"],
        info: SeqInfo,
        angles: tuple[Rotary, Rotary],
        key: int,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "T D"]:
        """`angles`: of layers without a window, and of those with one."""
        rotary = angles[0 if self.attention.window is None else 1]
        attended_TD = self.attention(self.attention_norm(x_TD), info, rotary, key, cache)
        x_TD = x_TD + self.attention_dropout(self.attention_out_norm(attended_TD), key)
        return x_TD + self.mlp_dropout(self.mlp_out_norm(self.mlp(self.mlp_norm(x_TD))), key)


class Gemma(CausalModel):
    """The whole model with its loss."""

    def __init__(self, config: GemmaConfig, loss: LossConfig, *, activation_checkpointing: bool = False) -> None:
        super().__init__(config.num_layers)
        self.config = config
        sites = itertools.count()
        self.embedding = Embedding(config.vocabulary_size, config.width, config.init_std)
        self.embedding_dropout = Dropout(config.dropout, next(sites))
        windows = (config.window if has_window(config, layer) else None for layer in range(config.num_layers))
        self.layers = LayerStack(
            (GemmaLayer(config, sites, window=window) for window in windows), checkpointed=activation_checkpointing
        )
        self.norm = RMSNorm(config.width, config.norm_eps, around_one=True)
        self.head = Head(
            self.embedding, Normal(config.init_std), loss, tied=config.tied_embeddings, softcap=config.logit_softcap
        )

    def _hidden(self, ids_T: Tensor, info: SeqInfo, key: int, cache: Cache | None = None) -> Tensor:
        config = self.config
        x_TD = self.embedding(ids_T)
        # The factor is rounded to the weights' dtype, as in the published models.
        x_TD = self.embedding_dropout(x_TD * torch.tensor(math.sqrt(config.width), dtype=x_TD.dtype), key)
        angles = tuple(
            rotary_angles(info.positions, config.width_per_head, theta, x_TD.dtype, scaling)
            for theta, scaling in (
                (config.rope_theta, config.rope_scaling),
                (config.window_rope_theta or config.rope_theta, None),
            )
        )
        caches = [None] * len(self.layers) if cache is None else cache.layers
        return self.norm(self.layers(x_TD, info, angles, key, per_layer=caches))
