"""The DeepSpeed dict of a run. PURE: no torch, no deepspeed.

takes -> the config's sections, ranks; gives -> the dict, and the number of micro-batches per rank.
DeepSpeed ignores misspelt top-level keys, so the dict is only made here, never passed through, and a
test checks every key against DeepSpeed's own schema. Its batch arithmetic counts the empty
micro-batches that fill the last round: train_batch_size = m x R x ceil(J / R).
"""

from __future__ import annotations

import math
from typing import Any

from pretrain.config.batches import batches_of
from pretrain.config.schema import BatchConfig, EngineConfig, OptimizerConfig, RunConfig


def accumulation_steps(batch: BatchConfig, world_size: int) -> int:
    """ceil(J / R): micro-batches of one rank per step, the empty ones that fill the last round included."""
    micro_batches = batch.global_batch_size // batch.micro_batch_size
    return -(-micro_batches // world_size)


def sharing_ranks(engine: EngineConfig, world_size: int) -> int:
    """How many ranks share experts, of so many: what is configured, or its largest divisor that they allow."""
    return math.gcd(engine.expert_parallel_size, world_size)


def most_accumulated(config: RunConfig, world_size: int) -> BatchConfig:
    """The batch section with the most micro-batches a step: DeepSpeed is told of it and divides by its number always;
    steps with fewer need no word to it."""
    sections = batches_of(config.batch, config.data.stages)
    return max(sections, key=lambda batch: accumulation_steps(batch, world_size))


def deepspeed_config(
    engine: EngineConfig, batch: BatchConfig, optimizer: OptimizerConfig, world_size: int
) -> dict[str, Any]:
    """The dict for `deepspeed.initialize`; the optimizer itself is handed over as an object."""
    steps = accumulation_steps(batch, world_size)
    config: dict[str, Any] = {
        "train_batch_size": batch.micro_batch_size * world_size * steps,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": 0.0 if clips_itself(engine) else optimizer.gradient_clipping,
        "bf16": _bf16(engine),
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
        # Only says that DeepSpeed's authors did not try that class (SGD); the tests here do.
        "zero_allow_untested_optimizer": True,
    }
    zero: dict[str, Any] = {"stage": engine.zero_stage}
    if engine.zero_stage:
        zero |= {
            "overlap_comm": engine.overlap_communication,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": engine.reduce_bucket_elements,
            # NCCL's alignment wants an even number.
            "allgather_bucket_size": engine.allgather_bucket_elements + engine.allgather_bucket_elements % 2,
        }
    if engine.offload_optimizer == "cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        # torch's fused AdamW on the host instead of DeepSpeed's, which a compiler would have to build first.
        config["zero_force_ds_cpu_optimizer"] = False
    if optimizer.kind == "muon":
        zero["reduce_scatter"] = False  # it orthogonalizes whole gradients
    if engine.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": engine.allgather_bucket_elements,
            "stage3_param_persistence_threshold": engine.persistence_threshold_elements,
        }
    return {**config, "zero_optimization": zero}


def _bf16(engine: EngineConfig) -> dict[str, bool]:
    if engine.state_precision == "bf16":
        return {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    return {"enabled": engine.precision == "bf16"}


def clips_itself(engine: EngineConfig) -> bool:
    """Whether our engine clips: at stage 0 fp32, where DeepSpeed neither reports the norm nor skips a NaN."""
    return engine.zero_stage == 0 and engine.precision == "fp32"
