"""The encoder <-> BertForMaskedLM.

They add one of two segment vectors to every token, we have one segment: on import its vector goes into
the positions, on export it is zero. Poolers and next-sentence heads are no part of a masked LM and are left.
Source: transformers' modeling_bert.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrain.config.schema import EncoderConfig
from pretrain.model.hf.family import Exchange, ExportOptions, State, refuse, refuse_scaled, require, without
from pretrain.model.hf.weights import Weight, dense, layer_norm

_SEGMENTS = "bert.embeddings.token_type_embeddings.weight"
_POSITIONS = "bert.embeddings.position_embeddings.weight"
_HEAD = "cls.predictions"


def _weights(config: EncoderConfig) -> list[Weight]:
    width, hidden, vocabulary = config.width, config.feed_forward_width, config.vocabulary_size
    weights = [
        Weight.same("embedding.table.weight", "bert.embeddings.word_embeddings.weight", vocabulary, width),
        Weight.same("embedding.positions.weight", _POSITIONS, config.max_length, width),
        *layer_norm("embedding.norm", "bert.embeddings.LayerNorm", width),
        *dense("transform.dense", f"{_HEAD}.transform.dense", width, width),
        *layer_norm("transform.norm", f"{_HEAD}.transform.LayerNorm", width),
        Weight.same("head.bias", f"{_HEAD}.bias", vocabulary),
    ]
    if not config.tied_embeddings:
        weights.append(Weight.same("head.weight", f"{_HEAD}.decoder.weight", vocabulary, width))
    for index in range(config.num_layers):
        ours, theirs = f"layers.{index}", f"bert.encoder.layer.{index}"
        projections = [f"{theirs}.attention.self.{name}" for name in ("query", "key", "value")]
        weights += [
            Weight.fused(f"{ours}.attention.qkv.weight", [f"{p}.weight" for p in projections], [width] * 3, width),
            Weight.fused(f"{ours}.attention.qkv.bias", [f"{p}.bias" for p in projections], [width] * 3),
            *dense(f"{ours}.attention.output", f"{theirs}.attention.output.dense", width, width),
            *layer_norm(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm", width),
            *dense(f"{ours}.mlp.inner", f"{theirs}.intermediate.dense", hidden, width),
            *dense(f"{ours}.mlp.outer", f"{theirs}.output.dense", width, hidden),
            *layer_norm(f"{ours}.mlp_norm", f"{theirs}.output.LayerNorm", width),
        ]
    return weights


def _to_config(config: EncoderConfig, options: ExportOptions) -> dict[str, Any]:
    refuse_scaled(config)
    return options.common() | {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.width,
        "intermediate_size": config.feed_forward_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "hidden_act": "gelu",
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "max_position_embeddings": config.max_length,
        "type_vocab_size": 2,
        "initializer_range": config.init_std,
        "layer_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
    }


def _from_config(body: Mapping[str, Any]) -> EncoderConfig:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    require(body, names)
    allowed = {
        "hidden_act": ("gelu",), "position_embedding_type": ("absolute",), "is_decoder": (False,),
        "add_cross_attention": (False,),
    }  # fmt: skip
    refuse(body, allowed, "encoder")
    return EncoderConfig(
        vocabulary_size=body["vocab_size"],
        width=body["hidden_size"],
        feed_forward_width=body["intermediate_size"],
        num_layers=body["num_hidden_layers"],
        num_heads=body["num_attention_heads"],
        max_length=body.get("max_position_embeddings", 512),
        norm_eps=body.get("layer_norm_eps", 1e-12),
        tied_embeddings=body.get("tie_word_embeddings", True),
        dropout=body.get("hidden_dropout_prob", 0.1),
        init_std=body.get("initializer_range", 0.02),
        attention_dropout=body.get("attention_probs_dropout_prob", 0.1),
    )


def _extras(config: EncoderConfig) -> dict[str, tuple[int, ...] | str]:
    extras: dict[str, tuple[int, ...] | str] = {_SEGMENTS: (2, config.width)}
    if not config.tied_embeddings:
        extras[f"{_HEAD}.decoder.bias"] = f"{_HEAD}.bias"
    return extras


def _before_import(state: State, config: EncoderConfig) -> State:
    read = state.get(f"{_HEAD}.decoder.bias")  # what they compute with; untied, `bias` is left as it began
    if read is not None and not config.tied_embeddings:
        state = state | {f"{_HEAD}.bias": read}
    copies = [f"{_HEAD}.decoder.bias", *([f"{_HEAD}.decoder.weight"] if config.tied_embeddings else [])]
    kept = without(state, "bert.pooler.", "cls.seq_relationship.", "bert.embeddings.position_ids", *copies)
    old = {".gamma": ".weight", ".beta": ".bias"}  # what the first checkpoints call the parts of a norm
    for end, new_end in old.items():
        kept = {name.removesuffix(end) + new_end if name.endswith(end) else name: x for name, x in kept.items()}
    segments = kept.pop(_SEGMENTS, None)
    if segments is not None and _POSITIONS in kept:
        kept[_POSITIONS] = kept[_POSITIONS] + segments[0]
    return kept


BERT = Exchange(_weights, _to_config, _from_config, extras=_extras, before_import=_before_import)
