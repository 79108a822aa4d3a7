"""GPT-2 <-> GPT2LMHeadModel. Their projections (Conv1D) have inputs as rows.

Source: transformers' modeling_gpt2.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrain.config.schema import GPT2Config
from pretrain.model.hf.family import Exchange, ExportOptions, State, refuse, refuse_scaled, without
from pretrain.model.hf.weights import Weight, dense, layer_norm

_HEAD = "lm_head.weight"


def _weights(config: GPT2Config) -> list[Weight]:
    width, hidden = config.width, config.feed_forward_width
    weights = [
        Weight.same("embedding.weight", "transformer.wte.weight", config.vocabulary_size, width),
        Weight.same("positions.weight", "transformer.wpe.weight", config.max_length, width),
        *layer_norm("norm", "transformer.ln_f", width),
    ]
    if not config.tied_embeddings:
        weights.append(Weight.same("head.weight", _HEAD, config.vocabulary_size, width))
    for index in range(config.num_layers):
        ours, theirs = f"layers.{index}", f"transformer.h.{index}"
        weights += [
            *layer_norm(f"{ours}.attention_norm", f"{theirs}.ln_1", width),
            *dense(f"{ours}.attention.qkv", f"{theirs}.attn.c_attn", 3 * width, width, transposed=True),
            *dense(f"{ours}.attention.output", f"{theirs}.attn.c_proj", width, width, transposed=True),
            *layer_norm(f"{ours}.mlp_norm", f"{theirs}.ln_2", width),
            *dense(f"{ours}.mlp.inner", f"{theirs}.mlp.c_fc", hidden, width, transposed=True),
            *dense(f"{ours}.mlp.outer", f"{theirs}.mlp.c_proj", width, hidden, transposed=True),
        ]
    return weights


def _to_config(config: GPT2Config, options: ExportOptions) -> dict[str, Any]:
    refuse_scaled(config)
    return (
        {"bos_token_id": options.eos_id, "eos_token_id": options.eos_id}
        | options.common()
        | {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": config.vocabulary_size,
            "n_positions": config.max_length,
            "n_embd": config.width,
            "n_inner": config.feed_forward_width,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "activation_function": "gelu_new",
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.attention_dropout,
            "layer_norm_epsilon": config.norm_eps,
            "initializer_range": config.init_std,
            "tie_word_embeddings": config.tied_embeddings,
        }
    )


def _from_config(body: Mapping[str, Any]) -> GPT2Config:
    allowed = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
    }  # fmt: skip
    refuse(body, allowed, "gpt2")
    width = body.get("n_embd", 768)
    return GPT2Config(
        vocabulary_size=body.get("vocab_size", 50257),
        width=width,
        feed_forward_width=body.get("n_inner") or 4 * width,
        num_layers=body.get("n_layer", 12),
        num_heads=body.get("n_head", 12),
        max_length=body.get("n_positions", 1024),
        norm_eps=body.get("layer_norm_epsilon", 1e-5),
        tied_embeddings=body.get("tie_word_embeddings", True),
        dropout=body.get("resid_pdrop", 0.1),
        init_std=body.get("initializer_range", 0.02),
        attention_dropout=body.get("attn_pdrop", 0.1),
    )


def _before_import(state: State, config: GPT2Config) -> State:
    """Published files lack the prefix and hold causal masks as buffers."""
    state = {name if name.startswith(("transformer.", _HEAD)) else f"transformer.{name}": state[name] for name in state}
    kept = without(state, _HEAD) if config.tied_embeddings else state
    return {name: tensor for name, tensor in kept.items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}


GPT2 = Exchange(_weights, _to_config, _from_config, before_import=_before_import)
