"""Small models and batches that the tests of this room share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pretrain.config.schema import (
    AnyModelConfig,
    DecoderConfig,
    EncoderConfig,
    EncoderDecoderConfig,
    GemmaConfig,
    GPT2Config,
    MoEConfig,
    T5Config,
)
from pretrain.sequence import IGNORED_LABEL, Batch, SeqInfo

VOCABULARY = 101


def decoder_config(**changes: Any) -> DecoderConfig:
    values: dict[str, Any] = {
        "vocabulary_size": VOCABULARY, "width": 32, "num_heads": 4, "num_kv_heads": 2, "feed_forward_width": 48,
        "num_layers": 2,
    }  # fmt: skip
    return DecoderConfig(**(values | changes))


def encoder_decoder_config(**changes: Any) -> EncoderDecoderConfig:
    values: dict[str, Any] = {
        "vocabulary_size": VOCABULARY, "width": 32, "num_heads": 4, "feed_forward_width": 48,
        "num_encoder_layers": 2, "num_decoder_layers": 2,
    }  # fmt: skip
    return EncoderDecoderConfig(**(values | changes))


def encoder_config(**changes: Any) -> EncoderConfig:
    values: dict[str, Any] = {
        "vocabulary_size": VOCABULARY, "width": 32, "num_heads": 4, "feed_forward_width": 48, "num_layers": 2,
        "max_length": 32,
    }  # fmt: skip
    return EncoderConfig(**(values | changes))


def gpt2_config(**changes: Any) -> GPT2Config:
    values: dict[str, Any] = {
        "vocabulary_size": VOCABULARY, "width": 32, "num_heads": 4, "feed_forward_width": 48, "num_layers": 2,
        "max_length": 32,
    }  # fmt: skip
    return GPT2Config(**(values | changes))


def t5_config(**changes: Any) -> T5Config:
    values: dict[str, Any] = {
        "vocabulary_size": VOCABULARY, "width": 32, "num_heads": 4, "head_width": 6, "feed_forward_width": 48,
        "num_encoder_layers": 2, "num_decoder_layers": 3, "num_buckets": 8, "max_distance": 12,
    }  # fmt: skip
    return T5Config(**(values | changes))


def t5_v1_0_config(**changes: Any) -> T5Config:
    return t5_config(**({"feed_forward": "relu"} | changes))


def gemma_config(**changes: Any) -> GemmaConfig:
    """As Gemma 2: caps, a window in every second layer."""
    values: dict[str, Any] = {
        "vocabulary_size": VOCABULARY, "width": 32, "num_heads": 4, "num_kv_heads": 2, "head_width": 10,
        "feed_forward_width": 48, "num_layers": 2, "window": 5, "attention_softcap": 2.0, "logit_softcap": 3.0,
    }  # fmt: skip
    return GemmaConfig(**(values | changes))


def gemma_3_config(**changes: Any) -> GemmaConfig:
    values: dict[str, Any] = {
        "attention_softcap": None, "logit_softcap": None, "qk_norm": True, "full_every": 3, "num_layers": 3,
        "rope_theta": 1e6, "window_rope_theta": 1e4,
    }  # fmt: skip
    return gemma_config(**(values | changes))


def moe_config(**changes: Any) -> MoEConfig:
    """As Mixtral, without the router's losses: those belong to a micro-batch, not to its documents."""
    values: dict[str, Any] = {
        "vocabulary_size": VOCABULARY, "width": 32, "num_heads": 4, "num_kv_heads": 2, "feed_forward_width": 24,
        "num_layers": 2, "num_experts": 4, "balance_loss": 0.0, "router_z_loss": 0.0, "init_std": 0.1,
    }  # fmt: skip
    return MoEConfig(**(values | changes))


FAMILIES: dict[str, Callable[..., AnyModelConfig]] = {
    "decoder": decoder_config,
    "encoder_decoder": encoder_decoder_config,
    "encoder": encoder_config,
    "gpt2": gpt2_config,
    "t5": t5_config,
    "t5_v1_0": t5_v1_0_config,
    "decoder_alibi": lambda **changes: decoder_config(**({"positions": "alibi"} | changes)),
    "decoder_learned": lambda **changes: decoder_config(**({"positions": "learned", "max_length": 64} | changes)),
    "gemma": gemma_config,
    "gemma_3": gemma_3_config,
    "moe": moe_config,
    "moe_qwen": lambda **changes: moe_config(**({"qk_norm": True, "normalised_experts": False} | changes)),
}
"""A small config of each family; the conformance tests run over all of them."""


def random_ids(count: int, seed: int = 0, vocabulary_size: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(0, vocabulary_size, (count,), generator=torch.Generator().manual_seed(seed))


def make_batch(
    ids: torch.Tensor,
    lengths: Sequence[int],
    labels: torch.Tensor,
    source: tuple[torch.Tensor, Sequence[int]] | None = None,
    *,
    dropout_key: int = 77,
) -> Batch:
    return Batch(
        index=0,
        decoder_ids=ids,
        decoder_info=SeqInfo.from_lengths(list(lengths)),
        labels=labels,
        encoder_ids=None if source is None else source[0],
        encoder_info=None if source is None else SeqInfo.from_lengths(list(source[1])),
        dropout_key=dropout_key,
        target_tokens=int((labels != IGNORED_LABEL).sum()),
        target_bytes=0,
        digest=0,
    )


def lm_batch(lengths: Sequence[int], *, seed: int = 0, vocabulary_size: int = VOCABULARY) -> Batch:
    """Next-token batch of random documents; the last token of each has no label."""
    ids = random_ids(sum(lengths), seed, vocabulary_size)
    labels = ids.roll(-1)
    labels[torch.tensor(list(lengths)).cumsum(0) - 1] = IGNORED_LABEL
    return make_batch(ids, lengths, labels)


def pair_batch(source_lengths: Sequence[int], target_lengths: Sequence[int], *, seed: int = 0) -> Batch:
    """Source and target documents of random ids; every target position has a label."""
    count = sum(target_lengths)
    return make_batch(
        random_ids(count, seed),
        target_lengths,
        random_ids(count, seed + 1),
        (random_ids(sum(source_lengths), seed + 2), source_lengths),
    )


def masked_batch(lengths: Sequence[int], *, seed: int = 0) -> Batch:
    """Documents of random ids where a third of the tokens has a label."""
    ids = random_ids(sum(lengths), seed)
    chosen = torch.rand(len(ids), generator=torch.Generator().manual_seed(seed)) < 0.34
    return make_batch(ids, lengths, torch.where(chosen, random_ids(len(ids), seed + 1), IGNORED_LABEL))


SOURCE_LENGTHS, TARGET_LENGTHS = (7, 3, 11, 1), (4, 9, 2, 6)


def batch_for(config: AnyModelConfig, *, seed: int = 0) -> Batch:
    """Four packed documents of what the family trains on."""
    if config.layout == "encoder_decoder":
        return pair_batch(SOURCE_LENGTHS, TARGET_LENGTHS, seed=seed)
    make = masked_batch if config.layout == "encoder" else lm_batch
    return make((9, 1, 20, 13), seed=seed)


def documents_of(batch: Batch) -> list[Batch]:
    """Each document (and its source) as a batch of its own."""
    lengths = batch.decoder_info.lengths
    sources: list[Any] = [None] * len(lengths)
    if batch.encoder_ids is not None and batch.encoder_info is not None:
        sources = [(ids, [len(ids)]) for ids in batch.encoder_ids.split(batch.encoder_info.lengths)]
    pieces = zip(batch.decoder_ids.split(lengths), batch.labels.split(lengths), sources, strict=True)
    return [make_batch(ids, [len(ids)], labels, source) for ids, labels, source in pieces]


def empty_batch_for(config: AnyModelConfig, count: int = 40) -> Batch:
    """Padding only, longer than any document: what fills the last round of a step."""
    padding = torch.ones(count, dtype=torch.int64)
    source = (padding, [count]) if config.layout == "encoder_decoder" else None
    return make_batch(padding, [count], torch.full((count,), IGNORED_LABEL), source)
