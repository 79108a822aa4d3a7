"""T5 <-> T5ForConditionalGeneration, v1.0 and v1.1.

Their first layer of a stack holds the relative bias of all. Whether the output is tied, they read from
`tie_word_embeddings` when a config is loaded (it says whether to scale the output).
Source: transformers' modeling_t5.py and configuration_t5.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pretrain.config.schema import T5Config
from pretrain.errors import UserError
from pretrain.model.hf.family import Exchange, ExportOptions, State, require, without
from pretrain.model.hf.weights import Weight

_HEAD = "lm_head.weight"
_FEED_FORWARD: dict[Literal["relu", "gated_gelu"], str] = {"relu": "relu", "gated_gelu": "gated-gelu"}


def _weights(config: T5Config) -> list[Weight]:
    width = config.width
    weights = [Weight.same("embedding.weight", "shared.weight", config.vocabulary_size, width)]
    if not config.tied_embeddings:
        weights.append(Weight.same("head.weight", _HEAD, config.vocabulary_size, width))
    for side, num_layers in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers)):
        table = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        weights.append(Weight.same(f"{side}.bias.weight", table, config.num_buckets, config.num_heads))
        weights.append(Weight.same(f"{side}.norm.weight", f"{side}.final_layer_norm.weight", width))
        for index in range(num_layers):
            ours, theirs = f"{side}.layers.{index}", f"{side}.block.{index}.layer"
            weights += _attention(config, f"{ours}.attention", f"{theirs}.0", "SelfAttention")
            if side == "decoder":
                weights += _attention(config, f"{ours}.cross", f"{theirs}.1", "EncDecAttention")
            weights += _feed_forward(config, ours, f"{theirs}.{2 if side == 'decoder' else 1}")
    return weights


def _attention(config: T5Config, ours: str, theirs: str, name: str) -> list[Weight]:
    width = config.width
    inside = config.num_heads * config.width_per_head
    keys_values = [f"{theirs}.{name}.{part}.weight" for part in "kv"]
    return [
        Weight.same(f"{ours}_norm.weight", f"{theirs}.layer_norm.weight", width),
        Weight.same(f"{ours}.query.weight", f"{theirs}.{name}.q.weight", inside, width),
        Weight.fused(f"{ours}.key_value.weight", keys_values, (inside, inside), width),
        Weight.same(f"{ours}.output.weight", f"{theirs}.{name}.o.weight", width, inside),
    ]


def _feed_forward(config: T5Config, ours: str, theirs: str) -> list[Weight]:
    width, hidden, dense = config.width, config.feed_forward_width, f"{theirs}.DenseReluDense"
    norm = Weight.same(f"{ours}.mlp_norm.weight", f"{theirs}.layer_norm.weight", width)
    if config.feed_forward == "relu":
        return [
            norm,
            Weight.same(f"{ours}.mlp.inner.weight", f"{dense}.wi.weight", hidden, width),
            Weight.same(f"{ours}.mlp.outer.weight", f"{dense}.wo.weight", width, hidden),
        ]
    gates = [f"{dense}.wi_0.weight", f"{dense}.wi_1.weight"]
    return [
        norm,
        Weight.fused(f"{ours}.mlp.gate_up.weight", gates, (hidden, hidden), width),
        Weight.same(f"{ours}.mlp.down.weight", f"{dense}.wo.weight", width, hidden),
    ]


def _to_config(config: T5Config, options: ExportOptions) -> dict[str, Any]:
    return options.common() | {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": config.vocabulary_size,
        "d_model": config.width,
        "d_kv": config.width_per_head,
        "d_ff": config.feed_forward_width,
        "num_layers": config.num_encoder_layers,
        "num_decoder_layers": config.num_decoder_layers,
        "num_heads": config.num_heads,
        "relative_attention_num_buckets": config.num_buckets,
        "relative_attention_max_distance": config.max_distance,
        "dropout_rate": config.dropout,
        "layer_norm_epsilon": config.norm_eps,
        "feed_forward_proj": _FEED_FORWARD[config.feed_forward],
        "tie_word_embeddings": config.tied_embeddings,
    }


def _from_config(body: Mapping[str, Any]) -> T5Config:
    names = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads")
    require(body, names)
    kinds = {theirs: ours for ours, theirs in _FEED_FORWARD.items()}
    if body.get("feed_forward_proj", "relu") not in kinds:
        raise UserError(
            f"feed_forward_proj={body['feed_forward_proj']} cannot be imported. "
            f"model.family=t5 has {', '.join(kinds)}. Take a model with one of them."
        )
    return T5Config(
        vocabulary_size=body["vocab_size"],
        width=body["d_model"],
        head_width=body["d_kv"],
        feed_forward_width=body["d_ff"],
        num_encoder_layers=body["num_layers"],
        num_decoder_layers=body.get("num_decoder_layers") or body["num_layers"],
        num_heads=body["num_heads"],
        num_buckets=body.get("relative_attention_num_buckets", 32),
        max_distance=body.get("relative_attention_max_distance", 128),
        dropout=body.get("dropout_rate", 0.1),
        attention_dropout=body.get("dropout_rate", 0.1),  # they have one number for all
        norm_eps=body.get("layer_norm_epsilon", 1e-6),
        feed_forward=kinds[body.get("feed_forward_proj", "relu")],
        # What they save themselves has True in the second for v1.1 as well, and the truth in the first.
        tied_embeddings=body.get("scale_decoder_outputs", body.get("tie_word_embeddings", True)),
    )


def _before_import(state: State, config: T5Config) -> State:
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"  # in the first checkpoints
    if not config.tied_embeddings and _HEAD not in state and "shared.weight" in state:
        state = state | {
            _HEAD: state["shared.weight"].clone()
        }  # one table for both that is not scaled: as they compute
    copies = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", unused]
    return without(state, *copies, *([_HEAD] if config.tied_embeddings else []))


T5 = Exchange(_weights, _to_config, _from_config, before_import=_before_import)
