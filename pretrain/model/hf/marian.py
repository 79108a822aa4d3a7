"""The 2017 Transformer <-> MarianMTModel with ReLU.

Their sinusoids stand as [sines | cosines], the paper's and ours alternate: the channels of the residual
stream are put in their order on export and back on import, which changes no value and no result.
Their norms have an epsilon of 1e-5 that no config changes. Source: transformers' modeling_marian.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pretrain.config.schema import EncoderDecoderConfig
from pretrain.errors import UserError
from pretrain.model.hf.family import Exchange, ExportOptions, State, refuse, refuse_scaled, require, without
from pretrain.model.hf.weights import Weight, dense, layer_norm

_EPS = 1e-5
_HEAD = "lm_head.weight"
_BIAS = "final_logits_bias"
_FROM_STREAM = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "fc1.weight", "shared.weight", _HEAD)
_TO_STREAM = ("out_proj.weight", "out_proj.bias", "fc2.weight", "fc2.bias", "layer_norm.weight", "layer_norm.bias")


def _weights(config: EncoderDecoderConfig) -> list[Weight]:
    width, hidden = config.width, config.feed_forward_width
    weights = [Weight.same("embedding.table.weight", "model.shared.weight", config.vocabulary_size, width)]
    if not config.tied_embeddings:
        weights.append(Weight.same("head.weight", _HEAD, config.vocabulary_size, width))
    sides = (("encoder.layers", "encoder", config.num_encoder_layers), ("layers", "decoder", config.num_decoder_layers))
    for our_side, their_side, num_layers in sides:
        for index in range(num_layers):
            ours, theirs = f"{our_side}.{index}", f"model.{their_side}.layers.{index}"
            weights += _projections(f"{ours}.attention.qkv", f"{theirs}.self_attn", "qkv", width)
            weights += dense(f"{ours}.attention.output", f"{theirs}.self_attn.out_proj", width, width)
            weights += layer_norm(f"{ours}.attention_norm", f"{theirs}.self_attn_layer_norm", width)
            if their_side == "decoder":
                weights += dense(f"{ours}.cross.query", f"{theirs}.encoder_attn.q_proj", width, width)
                weights += _projections(f"{ours}.cross.key_value", f"{theirs}.encoder_attn", "kv", width)
                weights += dense(f"{ours}.cross.output", f"{theirs}.encoder_attn.out_proj", width, width)
                weights += layer_norm(f"{ours}.cross_norm", f"{theirs}.encoder_attn_layer_norm", width)
            weights += dense(f"{ours}.mlp.inner", f"{theirs}.fc1", hidden, width)
            weights += dense(f"{ours}.mlp.outer", f"{theirs}.fc2", width, hidden)
            weights += layer_norm(f"{ours}.mlp_norm", f"{theirs}.final_layer_norm", width)
    return weights


def _projections(ours: str, theirs: str, letters: str, width: int) -> list[Weight]:
    names = [f"{theirs}.{letter}_proj" for letter in letters]
    rows = [width] * len(names)
    return [
        Weight.fused(f"{ours}.weight", [f"{name}.weight" for name in names], rows, width),
        Weight.fused(f"{ours}.bias", [f"{name}.bias" for name in names], rows),
    ]


def _to_config(config: EncoderDecoderConfig, options: ExportOptions) -> dict[str, Any]:
    if config.norm_eps != _EPS:
        raise UserError(
            f"model.norm_eps={config.norm_eps:g} cannot be exported. The norms of Marian have {_EPS:g} whatever its "
            f"config says. Train with model.norm_eps={_EPS:g} to export the model."
        )
    refuse_scaled(config)
    sizes: dict[str, Any] = {}
    for side, num_layers in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers)):
        sizes |= {f"{side}_layers": num_layers, f"{side}_ffn_dim": config.feed_forward_width}
        sizes |= {f"{side}_attention_heads": config.num_heads}
    return (
        options.common()
        | sizes
        | {
            "architectures": ["MarianMTModel"],
            "model_type": "marian",
            "is_encoder_decoder": True,
            "vocab_size": config.vocabulary_size,
            "decoder_vocab_size": config.vocabulary_size,
            "d_model": config.width,
            "activation_function": "relu",
            "scale_embedding": True,
            "share_encoder_decoder_embeddings": True,
            "static_position_embeddings": True,
            "normalize_before": False,
            "dropout": config.dropout,
            "attention_dropout": config.attention_dropout,
            "max_position_embeddings": options.max_length,
            "tie_word_embeddings": config.tied_embeddings,
        }
    )


def _from_config(body: Mapping[str, Any]) -> EncoderDecoderConfig:
    names = ("vocab_size", "d_model", "encoder_layers", "decoder_layers", "encoder_ffn_dim", "encoder_attention_heads")
    require(body, names)
    allowed = {
        "activation_function": ("relu",), "scale_embedding": (True,), "share_encoder_decoder_embeddings": (True,),
        "normalize_before": (False,), "decoder_vocab_size": (body["vocab_size"], None),
        "decoder_ffn_dim": (body["encoder_ffn_dim"],),
        "decoder_attention_heads": (body["encoder_attention_heads"],),
    }  # fmt: skip
    refuse(body, allowed, "encoder_decoder")
    return EncoderDecoderConfig(
        vocabulary_size=body["vocab_size"],
        width=body["d_model"],
        feed_forward_width=body["encoder_ffn_dim"],
        num_encoder_layers=body["encoder_layers"],
        num_decoder_layers=body["decoder_layers"],
        num_heads=body["encoder_attention_heads"],
        norm_eps=_EPS,
        tied_embeddings=body.get("tie_word_embeddings", True),
        dropout=body.get("dropout", 0.1),
        attention_dropout=body.get("attention_dropout", 0.0),
    )


def _convert(name: str, tensor: Tensor, config: EncoderDecoderConfig) -> Tensor:
    order = torch.cat((torch.arange(0, config.width, 2), torch.arange(1, config.width, 2)))
    return _reordered(name, tensor, order)


def _extras(config: EncoderDecoderConfig) -> dict[str, tuple[int, ...] | str]:
    return {_BIAS: (1, config.vocabulary_size)}


def _before_import(state: State, config: EncoderDecoderConfig) -> State:
    bias = state.get(_BIAS)
    if bias is not None and bool(bias.any()):
        raise UserError(
            f"{_BIAS} is not zero. model.family=encoder_decoder has no bias on its logits. "
            "Take a model that was trained without one."
        )
    tables = [
        f"model.{side}.embed_{what}.weight" for side in ("encoder", "decoder") for what in ("tokens", "positions")
    ]
    kept = without(state, _BIAS, *tables, *([_HEAD] if config.tied_embeddings else []))
    order = torch.arange(config.width).view(2, -1).t().flatten()
    return {name: _reordered(name, tensor, order) for name, tensor in kept.items()}


def _reordered(name: str, tensor: Tensor, order: Tensor) -> Tensor:
    """Channels of the residual stream in another order: columns of what reads it, rows of what writes it."""
    if name.endswith(_FROM_STREAM) and tensor.shape[-1] == len(order):  # wrong shapes are reported together
        return tensor[:, order]
    if name.endswith(_TO_STREAM) and tensor.shape[0] == len(order):
        return tensor[order]
    return tensor


MARIAN = Exchange(_weights, _to_config, _from_config, _convert, _extras, _before_import)
