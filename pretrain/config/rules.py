"""Rules that hold between sections; each broken one becomes one line of the error. PURE."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pretrain.config.schema import RunConfig


def broken_rules(config: RunConfig) -> list[str]:
    """Every cross-field rule that the config breaks, as `<field=value>. <rule>. <remedy>`."""
    return [*_batch_rules(config), *_model_rules(config), *_schedule_rules(config), *_health_rules(config)]


def _batch_rules(config: RunConfig) -> list[str]:
    batch, data = config.batch, config.data
    problems = []
    if batch.global_batch_size % batch.micro_batch_size:
        down = batch.global_batch_size // batch.micro_batch_size * batch.micro_batch_size
        suggestion = down or batch.micro_batch_size
        problems.append(
            f"batch.global_batch_size={batch.global_batch_size} is not a multiple of "
            f"batch.micro_batch_size={batch.micro_batch_size}. A step is a whole number of micro-batches. "
            f"Set batch.global_batch_size={suggestion} or another batch.micro_batch_size."
        )
    if data.lanes & (data.lanes - 1):
        problems.append(
            f"data.lanes={data.lanes} is not a power of two. Lanes must divide the rows of a block. "
            f"Set data.lanes={1 << (data.lanes.bit_length() - 1)}."
        )
    pairs = config.objective.kind == "seq2seq"
    if pairs != (config.model.family == "encoder_decoder"):
        problems.append(
            f"objective.kind={config.objective.kind} does not fit model.family={config.model.family}. "
            "seq2seq trains encoder_decoder, causal_lm trains decoder. Change one of them."
        )
    if pairs and batch.source_length is None:
        problems.append(
            "batch.source_length is missing. A pair source is packed for a source and a target capacity. "
            "Set batch.source_length to the source capacity given to data build."
        )
    return problems


def _model_rules(config: RunConfig) -> list[str]:
    model = config.model
    problems = []
    head_width = getattr(model, "head_width", None)
    if head_width is None and model.width % model.num_heads:
        problems.append(
            f"model.width={model.width} is not a multiple of model.num_heads={model.num_heads}. "
            "Heads share the width equally. Change one of them."
        )
    elif model.family == "decoder" and (head_width or model.width // model.num_heads) % 2:
        problems.append(
            f"a head of width {head_width or model.width // model.num_heads} is odd. "
            "Rotary positions turn pairs of dimensions. Set an even model.head_width."
        )
    if model.family == "encoder_decoder" and model.width % 2:
        problems.append(
            f"model.width={model.width} is odd. Sinusoidal positions come in pairs. Set an even model.width."
        )
    num_kv_heads = getattr(model, "num_kv_heads", None)
    if num_kv_heads and model.num_heads % num_kv_heads:
        problems.append(
            f"model.num_kv_heads={num_kv_heads} does not divide model.num_heads={model.num_heads}. "
            "Query heads share key/value heads equally. Set a divisor."
        )
    return problems


def _schedule_rules(config: RunConfig) -> list[str]:
    schedule = config.schedule
    problems = []
    if schedule.warmup_steps + schedule.decay_steps > schedule.total_steps:
        problems.append(
            f"schedule.warmup_steps={schedule.warmup_steps} and schedule.decay_steps={schedule.decay_steps} exceed "
            f"schedule.total_steps={schedule.total_steps}. They are parts of it. Shorten them."
        )
    if schedule.decay_steps and schedule.kind != "wsd":
        problems.append(
            f"schedule.decay_steps={schedule.decay_steps} has no effect with schedule.kind={schedule.kind}. "
            "Only wsd has a decay phase. Remove it or set schedule.kind=wsd."
        )
    if schedule.kind == "inverse_sqrt" and schedule.warmup_steps == 0:
        problems.append(
            "schedule.warmup_steps=0 with schedule.kind=inverse_sqrt. The rate falls as sqrt(warmup / step). "
            "Set schedule.warmup_steps to at least 1."
        )
    return problems


def _health_rules(config: RunConfig) -> list[str]:
    health, cluster = config.health, config.cluster
    problems = []
    if not health.data_timeout_s < health.collective_timeout_s < health.heartbeat_timeout_s:
        problems.append(
            f"health.data_timeout_s={health.data_timeout_s:g}, collective_timeout_s={health.collective_timeout_s:g}, "
            f"heartbeat_timeout_s={health.heartbeat_timeout_s:g} do not rise. "
            "The rule is data < collective < heartbeat, so that the cause is named and not its victim."
        )
    if cluster.min_ranks and cluster.min_ranks > cluster.num_ranks:
        problems.append(
            f"cluster.min_ranks={cluster.min_ranks} is above cluster.num_ranks={cluster.num_ranks}. "
            "Set it to at most num_ranks."
        )
    return problems
