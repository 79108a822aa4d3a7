"""Names, fused matrices and configs of the decoder <-> those of Llama (no QK norm) and Qwen3 (QK norm). PURE.

Takes a state dict by our names -> one by theirs, and back; a round trip gives equal tensors. Both keep
rotary pairs half-split and group query heads the same way, so that no weight is permuted.
Source: transformers' modeling_llama.py and modeling_qwen3.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pretrain.config.schema import DecoderConfig
from pretrain.errors import UserError
from pretrain.model.positions.exchange import from_hf_rope, to_hf_rope

_OUTSIDE = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
_HEAD = ("head.weight", "lm_head.weight")
_PER_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
_QK_NORM = {
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
}
_FUSED = {
    "attention.qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "mlp.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
}


def to_hf_state(state: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Their state dict, contiguous tensors, dtype kept; a tied output matrix is left out, as they do.

    Raises:
        UserError: a parameter of the config is missing, unknown or of another shape.
    """
    state = {name: tensor for name, tensor in state.items() if not (config.tied_embeddings and name == _HEAD[0])}
    out: dict[str, Tensor] = {}
    expected: dict[str, tuple[int, ...]] = {}
    for ours, theirs, sizes in _pairs(config):
        expected[ours] = (sum(sizes), *_columns(ours, config))
        if ours in state and tuple(state[ours].shape) == expected[ours]:
            pieces = state[ours].split(sizes) if len(theirs) > 1 else (state[ours],)
            out.update((name, piece.contiguous()) for name, piece in zip(theirs, pieces, strict=True))
    _check({name: tuple(tensor.shape) for name, tensor in state.items()}, expected, "the weights")
    return out


def from_hf_state(hf_state: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Our state dict by the names of `named_parameters()` (a tied output matrix once, as embedding.weight).

    Raises:
        UserError: a tensor is missing, unknown or of another shape.
    """
    hf_state = {
        name: tensor
        for name, tensor in hf_state.items()
        if not name.endswith("rotary_emb.inv_freq") and not (config.tied_embeddings and name == _HEAD[1])
    }
    expected = {
        name: (size, *_columns(ours, config))
        for ours, theirs, sizes in _pairs(config)
        for name, size in zip(theirs, sizes, strict=True)
    }
    _check({name: tuple(tensor.shape) for name, tensor in hf_state.items()}, expected, "model.safetensors")
    return {ours: torch.cat([hf_state[name] for name in theirs]) for ours, theirs, _ in _pairs(config)}


def to_hf_config(config: DecoderConfig, max_length: int, dtype: torch.dtype) -> dict[str, Any]:
    """The body of config.json.

    Args:
        max_length: what they call max_position_embeddings: the sequence length of the training.
    """
    family = "qwen3" if config.qk_norm else "llama"
    rope = to_hf_rope(config.rope_theta, config.rope_scaling, _head_width(config))
    return {
        "architectures": [{"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[family]],
        "model_type": family,
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.width,
        "intermediate_size": config.feed_forward_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "head_dim": _head_width(config),
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": rope["rope_theta"],  # where transformers 4 reads it
        "rope_parameters": rope,
        "max_position_embeddings": max_length,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": config.init_std,
        "use_cache": True,
        "dtype": str(dtype).removeprefix("torch."),
    }


def from_hf_config(body: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json of Llama or Qwen3 describes.

    Raises:
        UserError: another model type, or a feature that the decoder does not have.
    """
    family = body.get("model_type")
    if family not in ("llama", "qwen3"):
        raise UserError(f"model_type={family} cannot be imported. The decoder computes what llama and qwen3 do.")
    rope = body.get("rope_parameters") or body.get("rope_scaling") or {}
    refused = {
        "attention_bias": body.get("attention_bias", False) not in (False, None),
        "mlp_bias": body.get("mlp_bias", False) not in (False, None),
        "use_sliding_window": bool(body.get("use_sliding_window", False)),
        "hidden_act": body.get("hidden_act", "silu") != "silu",
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise UserError(f"{name}={body.get(name)} cannot be imported. The decoder has no such part.")
    missing = [
        name
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        if name not in body
    ]
    if missing:
        raise UserError(f"config.json lacks {', '.join(missing)}. Export the model again.")
    return DecoderConfig(
        vocabulary_size=body["vocab_size"],
        width=body["hidden_size"],
        feed_forward_width=body["intermediate_size"],
        num_layers=body["num_hidden_layers"],
        num_heads=body["num_attention_heads"],
        num_kv_heads=body.get("num_key_value_heads"),
        head_width=body.get("head_dim"),
        qk_norm=family == "qwen3",
        norm_eps=body.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta", body.get("rope_theta", 10000.0)),
        rope_scaling=from_hf_rope(rope),
        tied_embeddings=body.get("tie_word_embeddings", False),
        init_std=body.get("initializer_range", 0.02),
    )


def _head_width(config: DecoderConfig) -> int:
    return config.head_width or config.width // config.num_heads


def _pairs(config: DecoderConfig) -> list[tuple[str, tuple[str, ...], list[int]]]:
    """(our name, their names, rows of each of theirs) of every parameter."""
    width, head_width = config.width, _head_width(config)
    queries, keys = config.num_heads * head_width, (config.num_kv_heads or config.num_heads) * head_width
    rows = {
        "embedding.weight": [config.vocabulary_size],
        "head.weight": [config.vocabulary_size],
        "attention.qkv.weight": [queries, keys, keys],
        "mlp.gate_up.weight": [config.feed_forward_width] * 2,
        "attention.query_norm.weight": [head_width],
        "attention.key_norm.weight": [head_width],
    }
    outside = dict(_OUTSIDE) if config.tied_embeddings else {**_OUTSIDE, _HEAD[0]: _HEAD[1]}
    names: dict[str, tuple[str, ...]] = {ours: (theirs,) for ours, theirs in outside.items()}
    layer = {name: (theirs,) for name, theirs in (_PER_LAYER | (_QK_NORM if config.qk_norm else {})).items()} | _FUSED
    for index in range(config.num_layers):
        for ours, theirs in layer.items():
            names[f"layers.{index}.{ours}"] = tuple(f"model.layers.{index}.{name}" for name in theirs)
    return [(ours, theirs, rows.get(re.sub(r"^layers\.\d+\.", "", ours), [width])) for ours, theirs in names.items()]


def _columns(ours: str, config: DecoderConfig) -> tuple[int, ...]:
    """Width of a matrix's input; nothing for a vector."""
    if ours.endswith("norm.weight"):
        return ()
    if ours.endswith("attention.output.weight"):
        return (config.num_heads * _head_width(config),)
    return (config.feed_forward_width if ours.endswith("mlp.down.weight") else config.width,)


def _check(found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], where: str) -> None:
    problems = [f"lacks {name}" for name in expected if name not in found]
    problems += [f"has unknown {name}" for name in found if name not in expected]
    problems += [
        f"has {name} of shape {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise UserError(
            f"{where} {', '.join(problems[:3])}{more}. They must be those of the config. "
            "Use the config that the weights were trained with."
        )
