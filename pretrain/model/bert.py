"""Encoder-only Transformer of BERT: post-norm layers with GELU over learned positions, masked-LM head.

Takes a Batch of packed documents whose labels stand at the masked places -> LossSums; every token sees
the whole own document. One segment only: BERT's segment vector is a constant, so it is part of the
positions. Head: norm(gelu(dense(x))), then the (tied) token table and a bias per entry.
Source: Devlin et al. 2019; initial weights N(0, init_std).
"""

from __future__ import annotations

import itertools

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from pretrain.config.schema import EncoderConfig, LossConfig
from pretrain.loss.sums import LossSums
from pretrain.model.checkpointing import LayerStack
from pretrain.model.dropout import Dropout
from pretrain.model.encoder import BlockInitials, EncoderLayer
from pretrain.model.head import Head
from pretrain.model.init import Normal
from pretrain.model.layers import Embedding, LayerNorm, Linear
from pretrain.model.positions import LearnedPositions
from pretrain.model.scaling import DeepNorm
from pretrain.sequence import Batch, SeqInfo


class BertEmbedding(nn.Module):
    """norm(token + position), both learned."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.table = Embedding(config.vocabulary_size, config.width, config.init_std)
        self.positions = LearnedPositions(config.max_length, config.width, Normal(config.init_std))
        self.norm = LayerNorm(config.width, config.norm_eps)

    def forward(self, ids_T: Int[Tensor, " T"], info: SeqInfo) -> Float[Tensor, "T D"]:
        return self.norm(self.table(ids_T) + self.positions(info.positions))


class HeadTransform(nn.Module):
    """norm(gelu(dense(x))): what stands between the layers and the vocabulary."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = Linear(config.width, config.width, Normal(config.init_std), bias=True)
        self.norm = LayerNorm(config.width, config.norm_eps)

    def forward(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        return self.norm(functional.gelu(self.dense(x_TD)))


class Bert(nn.Module):
    """The whole model with its loss. It fills gaps and continues nothing: it cannot decode."""

    def __init__(self, config: EncoderConfig, loss: LossConfig, *, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.config = config
        sites = itertools.count()
        initial = Normal(config.init_std)
        initials = BlockInitials.normal(config.init_std, DeepNorm.of(config).gain)
        self.embedding = BertEmbedding(config)
        self.embedding_dropout = Dropout(config.dropout, next(sites))
        self.layers = LayerStack(
            (EncoderLayer(config, sites, initials, "gelu") for _ in range(config.num_layers)),
            checkpointed=activation_checkpointing,
        )
        self.transform = HeadTransform(config)
        self.head = Head(self.embedding.table, initial, loss, tied=config.tied_embeddings, bias=True)

    def forward(self, batch: Batch) -> LossSums:
        """Sums of the loss over the batch's labels."""
        return self.head(self.hidden(batch), batch.labels)

    def hidden(self, batch: Batch) -> Float[Tensor, "T D"]:
        """What the head reads: the transformed output of the last layer."""
        info, key = batch.decoder_info, batch.dropout_key
        x_TD = self.embedding_dropout(self.embedding(batch.decoder_ids, info), key)
        return self.transform(self.layers(x_TD, info, key, per_layer=[None] * len(self.layers)))

    def logits(self, batch: Batch) -> Float[Tensor, "T V"]:
        """Logits of every position, at least fp32."""
        return self.head(self.hidden(batch))
