"""Gemma <-> Gemma2ForCausalLM (caps) and Gemma3ForCausalLM (QK norm).

Both keep rotary pairs half-split and group query heads as we do, so that no weight is permuted.
Source: transformers' modeling_gemma2.py, modeling_gemma3.py and their configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrain.config.schema import GemmaConfig
from pretrain.errors import UserError
from pretrain.model.hf.family import Exchange, ExportOptions, State, refuse, require, without
from pretrain.model.hf.gated_decoder import HEAD, decoder_weights, shared_fields
from pretrain.model.hf.weights import Weight
from pretrain.model.positions.exchange import from_hf_rope, to_hf_rope


def _layer_types(config: GemmaConfig) -> list[str]:
    return [
        "full_attention" if (layer + 1) % config.full_every == 0 else "sliding_attention"
        for layer in range(config.num_layers)
    ]


def _to_config(config: GemmaConfig, options: ExportOptions) -> dict[str, Any]:
    _refuse_what_neither_has(config)
    body = shared_fields(config, options) | {
        "architectures": ["Gemma3ForCausalLM" if config.qk_norm else "Gemma2ForCausalLM"],
        "model_type": "gemma3_text" if config.qk_norm else "gemma2",
        "query_pre_attn_scalar": int(config.query_scale or config.width_per_head),
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": config.window,
        "layer_types": _layer_types(config),
        "final_logit_softcapping": config.logit_softcap,
        "attn_logit_softcapping": config.attention_softcap,
        "attention_bias": False,
    }
    rope = to_hf_rope(config.rope_theta, config.rope_scaling, config.width_per_head)
    if not config.qk_norm:
        return body | {"rope_parameters": rope}
    window_rope = to_hf_rope(config.window_rope_theta or config.rope_theta, None, config.width_per_head)
    return body | {"rope_parameters": {"full_attention": rope, "sliding_attention": window_rope}}


def _refuse_what_neither_has(config: GemmaConfig) -> None:
    if config.query_scale is not None and config.query_scale != int(config.query_scale):
        raise UserError(
            f"model.query_scale={config.query_scale:g} cannot be exported. transformers wants a whole number there. "
            "Train with one to export the model."
        )
    if config.qk_norm and config.attention_softcap is not None:
        raise UserError(
            f"model.attention_softcap={config.attention_softcap:g} with model.qk_norm=on cannot be exported. "
            "transformers' Gemma 3 reads such a cap and does not apply it. Train with one of them to export the model."
        )
    if not config.qk_norm and config.window_rope_theta not in (None, config.rope_theta):
        raise UserError(
            f"model.window_rope_theta={config.window_rope_theta:g} without model.qk_norm cannot be exported. "
            "Gemma 2 has one base for all layers. Leave it out to export the model."
        )


def _from_config(body: Mapping[str, Any]) -> GemmaConfig:
    require(body, ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"))
    allowed = {
        "attention_bias": (False, None), "use_bidirectional_attention": (False, None),
        "hidden_activation": ("gelu_pytorch_tanh",),
    }  # fmt: skip
    refuse(body, allowed, "gemma")
    newer = body["model_type"] == "gemma3_text"
    if newer:
        refuse(body, {"attn_logit_softcapping": (None,)}, "gemma with qk_norm")
    rope = body.get("rope_parameters") or {}
    full, windowed = (rope.get(kind, rope) for kind in ("full_attention", "sliding_attention"))
    head_width = body.get("head_dim", 256)
    scale = body.get("query_pre_attn_scalar", 256)
    return GemmaConfig(
        vocabulary_size=body["vocab_size"],
        width=body["hidden_size"],
        feed_forward_width=body["intermediate_size"],
        num_layers=body["num_hidden_layers"],
        num_heads=body["num_attention_heads"],
        num_kv_heads=body.get("num_key_value_heads"),
        head_width=head_width,
        query_scale=float(scale) if scale != head_width else None,
        qk_norm=newer,
        attention_softcap=None if newer else body.get("attn_logit_softcapping", 50.0),
        logit_softcap=body.get("final_logit_softcapping", None if newer else 30.0),
        window=body.get("sliding_window", 4096),
        full_every=_full_every(body, 6 if newer else 2),
        rope_theta=full.get("rope_theta", body.get("rope_theta", 1e6 if newer else 1e4)),
        window_rope_theta=windowed.get("rope_theta", body.get("rope_local_base_freq", 1e4)) if newer else None,
        rope_scaling=from_hf_rope(full),
        norm_eps=body.get("rms_norm_eps", 1e-6),
        tied_embeddings=body.get("tie_word_embeddings", True),
        init_std=body.get("initializer_range", 0.02),
        attention_dropout=body.get("attention_dropout", 0.0),
    )


def _full_every(body: Mapping[str, Any], default: int) -> int:
    """The period of layers without a window. Raises UserError where there is none."""
    types = body.get("layer_types")
    if types is None:
        return int(body.get("sliding_window_pattern", default))
    period = types.index("full_attention") + 1 if "full_attention" in types else len(types) + 1
    expected = ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(len(types))]
    if types != expected:
        raise UserError(
            f"layer_types={types} cannot be imported. model.family=gemma has no window in every n-th layer. "
            "Take a model with such an order."
        )
    return period if "full_attention" in types else max(default, period)


def _weights(config: GemmaConfig) -> list[Weight]:
    norms = {
        "attention_norm": "input_layernorm", "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm", "mlp_out_norm": "post_feedforward_layernorm",
    }  # fmt: skip
    return decoder_weights(config, norms)


def _before_import(state: State, config: GemmaConfig) -> State:
    return without(state, *([HEAD] if config.tied_embeddings else []))


GEMMA = Exchange(_weights, _to_config, _from_config, before_import=_before_import)
