"""The decoder <-> Llama (no QK norm) and Qwen3 (QK norm).

Both keep rotary pairs half-split and group query heads the same way, so that no weight is permuted.
Source: transformers' modeling_llama.py and modeling_qwen3.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrain.config.schema import DecoderConfig
from pretrain.errors import UserError
from pretrain.model.hf.family import Exchange, ExportOptions, State, refuse, refuse_scaled, require, without
from pretrain.model.hf.gated_decoder import HEAD, decoder_weights, shared_fields
from pretrain.model.hf.weights import Weight
from pretrain.model.positions.exchange import from_hf_rope, to_hf_rope


def _to_config(config: DecoderConfig, options: ExportOptions) -> dict[str, Any]:
    if config.positions != "rope":
        raise UserError(
            f"model.positions={config.positions} cannot be exported. Llama and Qwen3 have rotary positions. "
            "Train with model.positions=rope to export the model."
        )
    refuse_scaled(config)
    family = "qwen3" if config.qk_norm else "llama"
    rope = to_hf_rope(config.rope_theta, config.rope_scaling, config.width_per_head)
    return shared_fields(config, options) | {
        "architectures": [{"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[family]],
        "model_type": family,
        "hidden_act": "silu",
        "rope_theta": rope["rope_theta"],  # where transformers 4 reads it
        "rope_parameters": rope,
        "attention_bias": False,
    }


def _from_config(body: Mapping[str, Any]) -> DecoderConfig:
    family = body["model_type"]
    rope = body.get("rope_parameters") or body.get("rope_scaling") or {}
    refuse(body, {"attention_bias": (False, None), "mlp_bias": (False, None), "hidden_act": ("silu",)}, "decoder")
    refuse(body, {"use_sliding_window": (False, None)}, "decoder")
    require(body, ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"))
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
        attention_dropout=body.get("attention_dropout", 0.0),
    )


def _weights(config: DecoderConfig) -> list[Weight]:
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return decoder_weights(config, norms)


def _before_import(state: State, config: DecoderConfig) -> State:
    kept = without(state, *([HEAD] if config.tied_embeddings else []))
    return {name: tensor for name, tensor in kept.items() if not name.endswith("rotary_emb.inv_freq")}


LLAMA = Exchange(_weights, _to_config, _from_config, before_import=_before_import)
