"""The mixture of experts <-> Mixtral (no QK norm) and Qwen3-MoE (QK norm).

Their files hold three matrices per expert under names of their own. The weights of a token's experts always
sum to 1 in Mixtral. Source: transformers' modeling_mixtral.py, modeling_qwen3_moe.py, conversion_mapping.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrain.config.schema import MoEConfig
from pretrain.errors import UserError
from pretrain.model.hf.family import Exchange, ExportOptions, State, refuse, require, without
from pretrain.model.hf.gated_decoder import HEAD, decoder_weights, shared_fields
from pretrain.model.hf.weights import Weight
from pretrain.model.positions.exchange import from_hf_rope, to_hf_rope

# Theirs of: the block, its gate, its up and its down matrix.
_NAMES = {False: ("block_sparse_moe", "w1", "w3", "w2"), True: ("mlp", "gate_proj", "up_proj", "down_proj")}


def _weights(config: MoEConfig) -> list[Weight]:
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    block, gate, up, down = _NAMES[config.qk_norm]
    experts, width, hidden = range(config.num_experts), config.width, config.feed_forward_width

    def block_weights(ours: str, theirs: str) -> list[Weight]:
        names = [f"{theirs}.{block}.experts.{expert}" for expert in experts]
        gates = [f"{name}.{matrix}.weight" for name in names for matrix in (gate, up)]
        downs = [f"{name}.{down}.weight" for name in names]
        return [
            Weight.same(f"{ours}.mlp.router.weight", f"{theirs}.{block}.gate.weight", config.num_experts, width),
            Weight.fused(f"{ours}.mlp.experts.gate_up", gates, [hidden] * len(gates), width),
            Weight.fused(f"{ours}.mlp.experts.down", downs, [width] * len(downs), hidden),
        ]

    return decoder_weights(config, norms, block_weights)


def _to_config(config: MoEConfig, options: ExportOptions) -> dict[str, Any]:
    if not config.qk_norm and not config.normalised_experts:
        raise UserError(
            "model.normalised_experts=off without model.qk_norm cannot be exported. The weights of a token's experts "
            "sum to 1 in Mixtral. Train with one of them on to export the model."
        )
    rope = to_hf_rope(config.rope_theta, config.rope_scaling, config.width_per_head)
    if config.qk_norm:
        own: dict[str, Any] = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": config.num_experts,
            "moe_intermediate_size": config.feed_forward_width,
            "norm_topk_prob": config.normalised_experts,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    else:
        own = {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": config.num_experts,
            "sliding_window": None,
        }
    both = {
        "num_experts_per_tok": config.experts_per_token,
        "router_aux_loss_coef": config.balance_loss,
        "hidden_act": "silu",
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
    }
    return shared_fields(config, options) | own | both


def _from_config(body: Mapping[str, Any]) -> MoEConfig:
    qwen = body["model_type"] == "qwen3_moe"
    hidden = "moe_intermediate_size" if qwen else "intermediate_size"
    # Published configs of Qwen3-MoE have the first, those that transformers 5 writes the second.
    count = "num_experts" if qwen and "num_experts" in body else "num_local_experts"
    require(body, ("vocab_size", "hidden_size", hidden, count, "num_hidden_layers", "num_attention_heads"))
    allowed: dict[str, tuple[Any, ...]] = {
        "attention_bias": (False, None), "hidden_act": ("silu",), "use_sliding_window": (False, None),
        "decoder_sparse_step": (1,), "mlp_only_layers": ([], None), "router_jitter_noise": (0.0, None),
    }  # fmt: skip
    refuse(body, allowed if qwen else allowed | {"sliding_window": (None,)}, "moe")
    rope = body.get("rope_parameters") or body.get("rope_scaling") or {}
    return MoEConfig(
        vocabulary_size=body["vocab_size"],
        width=body["hidden_size"],
        feed_forward_width=body[hidden],
        num_layers=body["num_hidden_layers"],
        num_heads=body["num_attention_heads"],
        num_kv_heads=body.get("num_key_value_heads"),
        head_width=body.get("head_dim"),
        num_experts=body[count],
        experts_per_token=body.get("num_experts_per_tok", 8 if qwen else 2),
        normalised_experts=body.get("norm_topk_prob", False) if qwen else True,
        balance_loss=body.get("router_aux_loss_coef", 0.001),
        router_z_loss=0.0,  # they have none
        qk_norm=qwen,
        norm_eps=body.get("rms_norm_eps", 1e-6 if qwen else 1e-5),
        rope_theta=rope.get("rope_theta", body.get("rope_theta", 1e4 if qwen else 1e6)),
        rope_scaling=from_hf_rope(rope),
        tied_embeddings=body.get("tie_word_embeddings", False),
        attention_dropout=body.get("attention_dropout", 0.0),
        init_std=body.get("initializer_range", 0.02),
    )


def _before_import(state: State, config: MoEConfig) -> State:
    return without(state, *([HEAD] if config.tied_embeddings else []))


MOE = Exchange(_weights, _to_config, _from_config, before_import=_before_import)
