"""Rules between the fields of a model, and between a model and what trains it. PURE."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pretrain.config.schema import AnyModelConfig, EngineConfig, OptimizerConfig


def model_rules(model: AnyModelConfig) -> list[str]:
    problems = []
    head_width = getattr(model, "head_width", None)
    if head_width is None and model.width % model.num_heads:
        problems.append(
            f"model.width={model.width} is not a multiple of model.num_heads={model.num_heads}. "
            "Heads share the width equally. Change one of them."
        )
    elif model.family in ("decoder", "gemma", "moe") and model.width_per_head % 2:
        problems.append(
            f"a head of width {model.width_per_head} is odd. "
            "Rotary positions turn pairs of dimensions. Set an even model.head_width."
        )
    if model.family == "encoder_decoder" and model.width % 2:
        problems.append(
            f"model.width={model.width} is odd. Sinusoidal positions come in pairs. Set an even model.width."
        )
    if model.family == "t5" and (
        model.num_buckets < 4 or model.num_buckets % 2 or model.max_distance <= model.num_buckets // 2
    ):
        problems.append(
            f"model.num_buckets={model.num_buckets} does not fit model.max_distance={model.max_distance}. "
            "Half of the buckets are exact, the rest reach max_distance. "
            "Set an even model.num_buckets of at least 4 and a model.max_distance above half of it."
        )
    num_kv_heads = getattr(model, "num_kv_heads", None)
    if num_kv_heads and model.num_heads % num_kv_heads:
        problems.append(
            f"model.num_kv_heads={num_kv_heads} does not divide model.num_heads={model.num_heads}. "
            "Query heads share key/value heads equally. Set a divisor."
        )
    return problems


def expert_rules(model: AnyModelConfig, engine: EngineConfig, optimizer: OptimizerConfig) -> list[str]:
    problems, size = [], engine.expert_parallel_size
    if model.family == "moe" and model.experts_per_token > model.num_experts:
        problems.append(
            f"model.experts_per_token={model.experts_per_token} is above model.num_experts={model.num_experts}. "
            "A token passes different experts. Set a smaller one."
        )
    if size == 1:
        return problems
    if model.family != "moe" or model.num_experts % size:
        have = f"model.num_experts={model.num_experts}" if model.family == "moe" else f"model.family={model.family}"
        problems.append(
            f"engine.expert_parallel_size={size} does not fit {have}. So many ranks share the experts of a layer "
            "equally. Set a divisor of the number of experts, 1 without any."
        )
    if engine.zero_stage not in (1, 2) or engine.offload_optimizer != "none" or optimizer.kind == "muon":
        problems.append(
            f"engine.expert_parallel_size={size} with engine.zero_stage={engine.zero_stage}, engine.offload_optimizer="
            f"{engine.offload_optimizer}, optimizer.kind={optimizer.kind} is not supported. DeepSpeed reduces shared "
            "experts at stages 1 and 2; offload and Muon are not tried with them. Set engine.expert_parallel_size=1 "
            "or change the others."
        )
    return problems


def learned_position_rules(model: AnyModelConfig) -> list[str]:
    if model.family != "decoder":
        return []
    if (model.positions == "learned") != (model.max_length is not None):
        return [
            f"model.max_length={model.max_length} does not fit model.positions={model.positions}. Learned positions "
            "need to know how many, others have no limit. Set model.max_length for learned, and only for them."
        ]
    if model.positions != "rope" and model.rope_scaling is not None:
        return [
            f"model.rope_scaling has no effect with model.positions={model.positions}. It scales rotary frequencies. "
            "Remove it."
        ]
    return []


def rope_rules(model: AnyModelConfig) -> list[str]:
    scaling = getattr(model, "rope_scaling", None)
    if scaling is None:
        return []
    names = {"yarn": ("beta_slow", "beta_fast"), "llama3": ("low_freq_factor", "high_freq_factor")}
    problems = []
    if scaling.kind in names:
        low, high = names[scaling.kind]
        if getattr(scaling, low) >= getattr(scaling, high):
            problems.append(
                f"model.rope_scaling.{low}={getattr(scaling, low):g} is not below "
                f"model.rope_scaling.{high}={getattr(scaling, high):g}. Frequencies between them are blended. "
                "Leave both out for the published values."
            )
    if scaling.kind in ("ntk", "yarn") and (getattr(model, "rope_theta", 0) <= 1 or model.width_per_head <= 2):
        problems.append(
            f"model.rope_scaling.kind={scaling.kind} needs model.rope_theta above 1 and heads wider than 2. "
            "It moves the base between the highest and the lowest frequency. Set kind=linear."
        )
    return problems


def mup_rules(model: AnyModelConfig, optimizer: OptimizerConfig) -> list[str]:
    if getattr(model, "mup", None) is None or optimizer.kind == "adamw":
        return []
    return [
        f"model.mup with optimizer.kind={optimizer.kind}. Its learning rates by layer are those of AdamW. "
        "Set optimizer.kind=adamw or remove model.mup."
    ]
