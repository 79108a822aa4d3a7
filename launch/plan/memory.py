"""Memory of one rank, by part, at the worst moment of a step. PURE.

Takes a config and the number of ranks → bytes of weights, gradients, optimizer, activations, loss, DeepSpeed's
buffers and the allocator's loss. A step has three moments that can be the worst: the loss, where all activations are
there; the backward pass of a layer; the optimizer's step. Two bytes an element in bf16, with fp32 masters.
Source: Rajbhandari et al. 2020 (ZeRO); what DeepSpeed holds beside that was measured (`benchmarks plan`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from launch.plan.activations import stacks_of
from pretrain.config import RunConfig
from pretrain.engine.zero import accumulation_steps, sharing_ranks
from pretrain.model.flops import expert_parameters, parameter_counts

# Of all else, for a caching allocator that cannot give every hole away.
FRAGMENTATION = {"cuda": 0.06, "cpu": 0.0}
# CUDA context, NCCL's buffers and workspaces of cuBLAS.
RUNTIME_BYTES = {"cuda": 1_800_000_000, "cpu": 0}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank by part, at the worst moment of a step."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    buffers: int
    runtime: int
    fragmentation: int
    moment: str

    @property
    def total_bytes(self) -> int:
        return sum(value for value in asdict(self).values() if isinstance(value, int))

    def to_json(self) -> dict[str, Any]:
        return {f"{name}_bytes" if name != "moment" else name: value for name, value in asdict(self).items()} | {
            "total_bytes": self.total_bytes
        }

    def parts(self) -> list[tuple[str, int]]:
        """Name and bytes, in the order of the fields."""
        return [(field.name, getattr(self, field.name)) for field in fields(self) if field.name != "moment"]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What the formulas need, in elements and bytes."""

    parameters: int  # that a rank's model has: all, but of shared experts its part
    layer: int  # the largest layer's parameters
    output: int  # the output matrix
    element: int  # bytes of a computing element
    ranks: int
    stage: int
    mixed: bool
    per_rank: int  # ceil(parameters / ranks)


def memory_per_rank(config: RunConfig, ranks: int) -> Memory:
    """The parts of one rank's memory."""
    sizes = _sizes(config, ranks)
    device = config.cluster.device
    moments = {
        "loss": _at_the_loss(config, sizes),
        "backward pass": _in_the_backward_pass(config, sizes),
        "optimizer step": _in_the_step(config, sizes),
    }
    name, parts = max(moments.items(), key=lambda item: sum(item[1].values()))
    lost = int(FRAGMENTATION[device] * sum(parts.values()))
    return Memory(**parts, runtime=RUNTIME_BYTES[device], fragmentation=lost, moment=name)


def _sizes(config: RunConfig, ranks: int) -> _Sizes:
    counts = parameter_counts(config.model)
    mixed = config.engine.precision == "bf16"
    num_layers = getattr(config.model, "num_layers", 0) or (
        getattr(config.model, "num_encoder_layers", 0) + getattr(config.model, "num_decoder_layers", 0)
    )
    outputs = 1 if config.model.tied_embeddings else 2
    experts, sharing = expert_parameters(config.model), sharing_ranks(config.engine, ranks)
    return _Sizes(
        parameters=counts.total - experts + experts // sharing,
        layer=(counts.total - outputs * counts.embedding) // max(1, num_layers),
        output=counts.embedding,
        element=2 if mixed else 4,
        ranks=ranks,
        stage=config.engine.zero_stage,
        mixed=mixed,
        per_rank=-(-counts.total // ranks),
    )


def _kept(config: RunConfig, sizes: _Sizes) -> dict[str, int]:
    """What stays from step to step."""
    held = sizes.parameters if sizes.stage < 3 else sizes.per_rank
    mine = sizes.parameters if sizes.stage == 0 else sizes.per_rank
    moments = 2 if config.optimizer.kind == "adamw" else int(config.optimizer.momentum > 0)
    masters = 4 * mine if sizes.mixed or sizes.stage > 0 else 0
    return {
        "weights": sizes.element * held,
        "gradients": 0,
        "optimizer": masters + 4 * moments * mine,
        "activations": 0,
        "loss": 0,
        "buffers": 0,
    }


def _gradients(config: RunConfig, sizes: _Sizes) -> int:
    """Gradients that are there while micro-batches are computed."""
    several = accumulation_steps(config.batch, sizes.ranks) > 1
    if sizes.stage < 2 or (config.engine.reduce_once and several):
        return sizes.element * sizes.parameters
    return sizes.element * sizes.per_rank


def _gathered(config: RunConfig, sizes: _Sizes) -> int:
    """Stage 3: whole weights of the layer that computes and of those fetched ahead, and the small ones that stay."""
    if sizes.stage < 3:
        return 0
    ahead = min(config.engine.allgather_bucket_elements, sizes.parameters)
    return sizes.element * min(sizes.parameters, sizes.layer + ahead)


def _buffers(config: RunConfig, sizes: _Sizes) -> int:
    """The bucket that gradients are reduced in, twice where reduction overlaps."""
    if sizes.stage == 0:
        return 0
    buckets = 2 if config.engine.overlap_communication else 1
    return buckets * sizes.element * config.engine.reduce_bucket_elements


def _activations(config: RunConfig, sizes: _Sizes) -> int:
    recomputed = config.engine.activation_checkpointing
    return sum(
        stack.kept_bytes(sizes.element, recomputed=recomputed) for stack in stacks_of(config.model, config.batch)
    )


def _at_the_loss(config: RunConfig, sizes: _Sizes) -> dict[str, int]:
    parts = _kept(config, sizes)
    tokens = config.batch.micro_batch_size * config.batch.sequence_length
    width, vocabulary = config.model.width, config.model.vocabulary_size
    chunk = min(tokens, config.loss.chunk_rows) * vocabulary
    forward = 8 * chunk + (sizes.element * chunk if sizes.mixed else 0)  # logits and log-softmax, fp32
    backward = 4 * sizes.output + (sizes.element * sizes.output if sizes.mixed else 0)
    gradients = 4 * sizes.output + sizes.element * tokens * width  # of the matrix, of the hidden states
    parts["loss"] = gradients + max(forward, backward) + sizes.element * tokens * width
    parts["activations"] = _activations(config, sizes)
    parts["gradients"] = _gradients(config, sizes)
    parts["buffers"] = _buffers(config, sizes)
    if sizes.stage == 3:
        parts["weights"] += sizes.element * sizes.output
    return parts


def _in_the_backward_pass(config: RunConfig, sizes: _Sizes) -> dict[str, int]:
    parts = _kept(config, sizes)
    stacks = stacks_of(config.model, config.batch)
    widest = max(stack.gradient_bytes(sizes.element) for stack in stacks)
    if config.engine.activation_checkpointing:
        widest += max(stack.layer_bytes(sizes.element) for stack in stacks)
    parts["activations"] = _activations(config, sizes) + widest
    # The gradient of the output matrix waits for the embedding's where they are one.
    waiting = sizes.element * sizes.output if config.model.tied_embeddings else 0
    parts["gradients"] = _gradients(config, sizes) + (waiting if sizes.stage >= 2 else 0)
    parts["buffers"] = _buffers(config, sizes)
    parts["weights"] += _gathered(config, sizes)
    return parts


def _in_the_step(config: RunConfig, sizes: _Sizes) -> dict[str, int]:
    parts = _kept(config, sizes)
    parts["gradients"] = _gradients(config, sizes)
    if sizes.mixed or sizes.stage > 0:  # fp32 copies of what this rank applies
        parts["gradients"] += 4 * (sizes.parameters if sizes.stage == 0 else sizes.per_rank)
    return parts
