"""Time of a step, tokens per day and cost, from shape, machine and layout. PURE.

    computing = passes * (matrices / (e_m * peak) + layers * width * tokens * e_s)
              + attention passes * attention / (e_a * peak)

passes = 3, or 4 where activations are computed again; attention recomputes once more in its own backward pass. To
that come the weights and gradients that ZeRO moves: each micro-batch at stage 3, each step below, over the slower of a
node's links and its network cards, half of it behind the computation. What a rank computes in vain counts too: the
empty micro-batches of the last round. Fitted and checked against published rows (`benchmarks plan`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from launch.plan.machines import GPUS_PER_NODE, Accelerator
from pretrain.config import RunConfig
from pretrain.config.schema import AnyModelConfig, BatchConfig
from pretrain.engine.zero import accumulation_steps
from pretrain.model.flops import parameter_counts, training_flops_per_row, training_flops_per_step

HIDDEN_FRACTION = 0.5  # of the communication, behind the computation
DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a run is, without failures.

    Attributes:
        step_s: seconds of an optimizer step.
        compute_s: of those, computing.
        exposed_communication_s: of those, waiting for other ranks.
        mfu: model FLOPs of the step over what the machines could do in that time.
        idle_fraction: of the micro-batch rounds, empty.
    """

    step_s: float
    compute_s: float
    exposed_communication_s: float
    tokens_per_step: int
    tokens_per_day: float
    tokens_per_second_per_gpu: float
    mfu: float
    idle_fraction: float
    run_days: float
    gpu_hours: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def speed_of(config: RunConfig, ranks: int, machine: Accelerator, *, node_size: int = GPUS_PER_NODE) -> Speed:
    """The speed of a run on `ranks` of a machine."""
    batch = config.batch
    rounds = accumulation_steps(batch, ranks)
    micro_batches = batch.global_batch_size // batch.micro_batch_size
    rows = rounds * batch.micro_batch_size
    recomputed = config.engine.activation_checkpointing
    compute = rows * row_seconds(config.model, batch, machine, recomputed=recomputed)
    moved = communication_seconds(config, ranks, machine, rounds, node_size)
    exposed = max(moved * (1.0 - HIDDEN_FRACTION), moved - compute)
    step = compute + exposed
    tokens = batch.global_batch_size * batch.sequence_length
    flops = training_flops_per_step(config.model, batch)
    run_s = step * config.schedule.total_steps
    return Speed(
        step_s=step,
        compute_s=compute,
        exposed_communication_s=exposed,
        tokens_per_step=tokens,
        tokens_per_day=tokens / step * DAY_S,
        tokens_per_second_per_gpu=tokens / step / ranks,
        mfu=flops / (step * ranks * machine.peak_flops),
        idle_fraction=1.0 - micro_batches / (rounds * ranks),
        run_days=run_s / DAY_S,
        gpu_hours=run_s * ranks / 3600.0,
    )


def row_seconds(model: AnyModelConfig, batch: BatchConfig, machine: Accelerator, *, recomputed: bool) -> float:
    """Seconds of computing for one row: forward, backward and what is computed again."""
    matrices, attention = split_flops(model, batch)
    passes, attention_passes = (4, 4.5) if recomputed else (3, 3.5)
    length = batch.sequence_length + (batch.source_length or 0)
    elements = _num_layers(model) * model.width * length / (2 if batch.source_length else 1)
    rate = machine.peak_flops
    seconds = passes * (matrices / (machine.matmul_fraction * rate) + elements * machine.element_s)
    return seconds + attention_passes * attention / (machine.attention_fraction * rate)


def split_flops(model: AnyModelConfig, batch: BatchConfig) -> tuple[float, float]:
    """Forward FLOPs of a row in matrix products, which grow with the length, and in attention, with its square."""
    twice = batch.model_copy(
        update={
            "sequence_length": 2 * batch.sequence_length,
            "source_length": batch.source_length and 2 * batch.source_length,
        }
    )
    once_flops, twice_flops = training_flops_per_row(model, batch) / 3, training_flops_per_row(model, twice) / 3
    attention = (twice_flops - 2 * once_flops) / 2
    return once_flops - attention, attention


def communication_seconds(
    config: RunConfig, ranks: int, machine: Accelerator, rounds: int, node_size: int = GPUS_PER_NODE
) -> float:
    """Seconds that weights and gradients are on the way in a step, if nothing hides them."""
    if ranks == 1:
        return 0.0
    element = 2 if config.engine.precision == "bf16" else 4
    weights = element * parameter_counts(config.model).total
    engine = config.engine
    reductions = 1 if engine.zero_stage < 2 or engine.reduce_once else rounds
    if engine.zero_stage == 3:
        gathers = (2 + (1 if engine.activation_checkpointing else 0)) * rounds
    else:
        gathers = 1  # at stage 0 the second half of an all-reduce
    bandwidth = machine.link_bytes_per_s
    if ranks > node_size:  # all cards of a node carry what one of its GPUs needs from elsewhere
        bandwidth = min(bandwidth, node_size * machine.network_bytes_per_s)
    return weights * (reductions + gathers) * (ranks - 1) / ranks / bandwidth


def _num_layers(model: AnyModelConfig) -> int:
    both = getattr(model, "num_encoder_layers", 0) + getattr(model, "num_decoder_layers", 0)
    return int(getattr(model, "num_layers", 0) or both)
