"""Decoder-only Transformer whose feed-forward blocks are mixtures of experts, as Mixtral and Qwen3-MoE.

Takes a Batch of packed documents -> LossSums; the objective holds the router's losses, weighted by the batch's
targets, so that they are means over the step whatever its micro-batches and blind to empty ones. Decoding as
any decoder. Attention, norms, positions and initial weights are those of `decoder`.
Sources: Jiang et al. 2024 (Mixtral); Qwen Team 2025 (Qwen3); losses as `experts` says.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pretrain.config.schema import LossConfig, MoEConfig
from pretrain.loss.sums import LossSums
from pretrain.model.cache import Cache, LayerCache
from pretrain.model.causal import CausalModel
from pretrain.model.checkpointing import LayerStack
from pretrain.model.decoder import DecoderAttention, Places
from pretrain.model.dropout import Dropout
from pretrain.model.experts import SparseMLP
from pretrain.model.head import Head
from pretrain.model.layers import Embedding, RMSNorm
from pretrain.model.positions import rotary_angles
from pretrain.model.scaling import Scaling
from pretrain.sequence import IGNORED_LABEL, Batch, SeqInfo


class MoELayer(nn.Module):
    """x + attention(norm(x)), then x + experts(norm(x)); sums the router's losses up beside."""

    def __init__(self, config: MoEConfig, scaling: Scaling, sites: Iterator[int]) -> None:
        super().__init__()
        site = next(sites)
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = DecoderAttention(config, scaling, site)
        self.attention_dropout = Dropout(config.dropout, site)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = SparseMLP(
            config.width, config.feed_forward_width, config.num_experts, config.experts_per_token, scaling.inner,
            scaling.outer, normalised=config.normalised_experts,
        )  # fmt: skip
        self.mlp_dropout = Dropout(config.dropout, next(sites))

    def forward(
        self,
        state: tuple[Tensor, Tensor],
        info: SeqInfo,
        places: Places,
        key: int,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`state`: hidden states [T, D] and the router's losses so far [2]."""
        x_TD, losses = state
        attended_TD = self.attention(self.attention_norm(x_TD), info, places, key, cache)
        x_TD = x_TD + self.attention_dropout(attended_TD, key)
        out_TD, own = self.mlp(self.mlp_norm(x_TD), info)
        return x_TD + self.mlp_dropout(out_TD, key), losses + own


class MoE(CausalModel):
    """The whole model with its loss."""

    def __init__(self, config: MoEConfig, loss: LossConfig, *, activation_checkpointing: bool = False) -> None:
        super().__init__(config.num_layers)
        self.config = config
        sites = itertools.count()
        scaling = Scaling.of(config)
        self.embedding = Embedding(config.vocabulary_size, config.width, config.init_std)
        self.embedding_dropout = Dropout(config.dropout, next(sites))
        self.layers = LayerStack(
            (MoELayer(config, scaling, sites) for _ in range(config.num_layers)), checkpointed=activation_checkpointing
        )
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = Head(self.embedding, scaling.table, loss, tied=config.tied_embeddings)

    def forward(self, batch: Batch) -> LossSums:
        """Sums of the loss over the batch's labels; the objective with the router's losses times their number."""
        x_TD, losses = self._run(batch.decoder_ids, batch.decoder_info, batch.dropout_key)
        objective, nll, z_loss = self.head(x_TD, batch.labels)
        router = self.config.balance_loss * losses[0] + self.config.router_z_loss * losses[1]
        return LossSums(objective + (batch.labels != IGNORED_LABEL).sum() * router, nll, z_loss)

    def router_losses(self, batch: Batch) -> Tensor:
        """[balance, z], means over the layers."""
        return self._run(batch.decoder_ids, batch.decoder_info, batch.dropout_key)[1]

    def _hidden(self, ids_T: Tensor, info: SeqInfo, key: int, cache: Cache | None = None) -> Tensor:
        return self._run(ids_T, info, key, cache)[0]

    def _run(self, ids_T: Tensor, info: SeqInfo, key: int, cache: Cache | None = None) -> tuple[Tensor, Tensor]:
        config = self.config
        x_TD = self.embedding_dropout(self.embedding(ids_T), key)
        angles = rotary_angles(
            info.positions, config.width_per_head, config.rope_theta, x_TD.dtype, config.rope_scaling
        )
        caches = [None] * len(self.layers) if cache is None else cache.layers
        zeros = torch.zeros(2, dtype=torch.promote_types(x_TD.dtype, torch.float32), device=x_TD.device)
        x_TD, losses = self.layers((x_TD, zeros), info, (angles, None), key, per_layer=caches)
        return self.norm(x_TD), losses / config.num_layers
