"""The weights of decoders with grouped heads and gated feed-forward, as Llama names them: Llama, Qwen3, Gemma,
and with experts in their place Mixtral and Qwen3-MoE.

Takes a config and the names of a layer's norms -> every weight with both names and shapes, and shared fields of their
config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pretrain.config.schema import DecoderConfig, GemmaConfig, MoEConfig
from pretrain.model.hf.family import ExportOptions
from pretrain.model.hf.weights import Weight

HEAD = "lm_head.weight"


def shared_fields(config: DecoderConfig | GemmaConfig | MoEConfig, options: ExportOptions) -> dict[str, Any]:
    """What `config.json` says of all of them alike."""
    return options.common() | {
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.width,
        "intermediate_size": config.feed_forward_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "head_dim": config.width_per_head,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": options.max_length,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_dropout": config.attention_dropout,
        "initializer_range": config.init_std,
    }


def decoder_weights(
    config: DecoderConfig | GemmaConfig | MoEConfig,
    norms: Mapping[str, str],
    block: Callable[[str, str], list[Weight]] | None = None,
) -> list[Weight]:
    """Every parameter; a tied output matrix is left out, as they do.

    Args:
        norms: our name of each norm of a layer -> theirs.
        block: the weights of a layer's feed-forward block, from the names of the layer here and there; none means one
            gated block.
    """
    width, vocabulary = config.width, config.vocabulary_size
    head = config.width_per_head
    queries, keys = config.num_heads * head, (config.num_kv_heads or config.num_heads) * head
    weights = [
        Weight.same("embedding.weight", "model.embed_tokens.weight", vocabulary, width),
        Weight.same("norm.weight", "model.norm.weight", width),
    ]
    if not config.tied_embeddings:
        weights.append(Weight.same("head.weight", HEAD, vocabulary, width))
    for index in range(config.num_layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        attention = f"{theirs}.self_attn"
        projections = [f"{attention}.{name}_proj.weight" for name in "qkv"]
        weights += [Weight.same(f"{ours}.{o}.weight", f"{theirs}.{t}.weight", width) for o, t in norms.items()]
        weights += [
            Weight.fused(f"{ours}.attention.qkv.weight", projections, (queries, keys, keys), width),
            Weight.same(f"{ours}.attention.output.weight", f"{attention}.o_proj.weight", width, queries),
        ]
        weights += _gated_block(config, ours, theirs) if block is None else block(ours, theirs)
        if config.qk_norm:
            weights += [
                Weight.same(f"{ours}.attention.{side}_norm.weight", f"{attention}.{side[0]}_norm.weight", head)
                for side in ("query", "key")
            ]
    return weights


def _gated_block(config: DecoderConfig | GemmaConfig | MoEConfig, ours: str, theirs: str) -> list[Weight]:
    width, hidden, mlp = config.width, config.feed_forward_width, f"{theirs}.mlp"
    gates = [f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"]
    return [
        Weight.fused(f"{ours}.mlp.gate_up.weight", gates, (hidden, hidden), width),
        Weight.same(f"{ours}.mlp.down.weight", f"{mlp}.down_proj.weight", width, hidden),
    ]
