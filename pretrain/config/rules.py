"""Rules that hold between fields; each broken one becomes one line of the error. PURE.

A rule names the sections that it looks at, so that it also runs while another section is broken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pretrain.config.rules_data import batch_rules, data_rules, raw_rules
from pretrain.config.rules_model import expert_rules, learned_position_rules, model_rules, mup_rules, rope_rules

if TYPE_CHECKING:
    from pretrain.config.schema import (
        AnyModelConfig,
        BatchConfig,
        CheckpointConfig,
        ClusterConfig,
        DataConfig,
        EngineConfig,
        EvalConfig,
        HealthConfig,
        ObjectiveConfig,
        OptimizerConfig,
        ScheduleConfig,
    )


_SECRET = re.compile(
    r"(?i)(^|_)(api_?key|secret(_access)?(_key)?|access_key(_id)?|token|passwd|password|credentials?)$"
)

_DENOISED = ("encoder_decoder", "decoder")
_TRAINED_BY: dict[str, tuple[str, ...]] = {
    "causal_lm": ("decoder",),
    "seq2seq": ("encoder_decoder",),
    "masked_lm": ("encoder",),
    "prefix_lm": _DENOISED,
    "fill_in_the_middle": ("decoder",),
    "span_corruption": _DENOISED,
    "ul2": _DENOISED,
}
"""Layouts of the models that an objective trains."""


def broken_rules(sections: Mapping[str, Any]) -> list[str]:
    """Every broken rule as `<field=value>. <rule>. <remedy>`; rules on absent sections are left out."""
    return [
        problem
        for names, rule in _RULES
        if all(name in sections for name in names)
        for problem in rule(*(sections[name] for name in names))
    ]


def _objective_rules(objective: ObjectiveConfig, model: AnyModelConfig) -> list[str]:
    if model.layout not in _TRAINED_BY[objective.kind]:
        fitting = " or ".join(kind for kind, layouts in _TRAINED_BY.items() if model.layout in layouts)
        return [
            f"objective.kind={objective.kind} does not fit model.family={model.family}. "
            f"It trains {' and '.join(_TRAINED_BY[objective.kind])} models. "
            f"Set objective.kind={fitting}, or change model.family."
        ]
    if objective.kind == "masked_lm" and (objective.mask_id or 0) >= model.vocabulary_size:
        return [
            f"objective.mask_id={objective.mask_id} is not below model.vocabulary_size={model.vocabulary_size}. "
            "The mask needs an embedding. Set a smaller id or a larger vocabulary."
        ]
    return []


def _denoiser_rules(objective: ObjectiveConfig) -> list[str]:
    if objective.kind != "ul2":
        return []
    problems = []
    for name, denoiser in objective.denoisers.items():
        if (denoiser.mean_span_tokens is None) != (denoiser.mode == "S"):
            problems.append(
                f"objective.denoisers.{name}.mean_span_tokens={denoiser.mean_span_tokens} does not fit mode "
                f"{denoiser.mode}. R and X hide spans, S hides the end in one piece. "
                f"{'Leave it out' if denoiser.mode == 'S' else 'Set it, for example to 3'}."
            )
    return problems


def _room_rules(objective: ObjectiveConfig, batch: BatchConfig, data: DataConfig) -> list[str]:
    from pretrain.config.batches import batches_of

    shortest = getattr(objective, "min_document_tokens", 0)
    length = min(section.sequence_length for section in batches_of(batch, data.stages))
    if length > shortest:
        return []
    return [
        f"objective.min_document_tokens={shortest} leaves nothing to learn in rows of "
        f"batch.sequence_length={length}. A document in a row must be able to have that many tokens. "
        "Set a smaller objective.min_document_tokens or a longer batch.sequence_length."
    ]


def _position_rules(
    model: AnyModelConfig, objective: ObjectiveConfig, batch: BatchConfig, data: DataConfig
) -> list[str]:
    max_length = getattr(model, "max_length", None)
    if max_length is None or model.layout not in _TRAINED_BY[objective.kind]:
        return []
    from pretrain.config.batches import batches_of
    from pretrain.config.capacity import row_capacity

    batch = max(batches_of(batch, data.stages), key=lambda section: section.sequence_length)
    longest = row_capacity(objective, batch, model.layout).longest
    if longest <= max_length:
        return []
    grown = (
        "" if longest == batch.sequence_length else f" with objective.kind={objective.kind} (up to {longest} tokens)"
    )
    return [
        f"batch.sequence_length={batch.sequence_length}{grown} is above model.max_length={max_length}. "
        "Every position of a document needs its learned vector. "
        f"Set model.max_length={longest} or a shorter batch.sequence_length."
    ]


def _source_length_rules(objective: ObjectiveConfig, batch: BatchConfig) -> list[str]:
    if objective.kind == "seq2seq" and batch.source_length is None:
        return [
            "batch.source_length is missing. A pair source is packed for a source and a target capacity. "
            "Set batch.source_length to the source capacity given to data build."
        ]
    if objective.kind != "seq2seq" and batch.source_length is not None:
        return [
            f"batch.source_length={batch.source_length} has no effect with objective.kind={objective.kind}. "
            "Only pair sources have a source side. Remove it."
        ]
    return []


def _eval_rules(evaluation: EvalConfig, data: DataConfig) -> list[str]:
    if evaluation.every_steps is None or data.validation:
        return []
    return [
        f"eval.every_steps={evaluation.every_steps} has no effect without data.validation. "
        "Validation needs held-out sources. Add data.validation or remove eval.every_steps."
    ]


def _checkpoint_eval_rules(evaluation: EvalConfig, data: DataConfig, cluster: ClusterConfig) -> list[str]:
    if evaluation.checkpoints is None:
        return []
    problems = []
    if not data.validation and evaluation.translation is None:
        problems.append(
            "eval.checkpoints has nothing to measure. It takes the losses of data.validation and the scores of "
            "eval.translation. Add one of them, or remove it."
        )
    if not cluster.spare_ranks:
        problems.append(
            "eval.checkpoints has no slot. Checkpoints are measured on a slot beyond those of the ranks. Set "
            "cluster.spare_ranks=1, or remove it and run pretrain evaluate RUN --follow where there is a free machine."
        )
    return problems


def _sample_rules(evaluation: EvalConfig, model: AnyModelConfig) -> list[str]:
    if evaluation.samples is None or model.layout != "encoder":
        return []
    return [
        f"eval.samples does not fit model.family={model.family}. An encoder continues nothing. "
        "Remove it or change model.family."
    ]


def _translation_rules(evaluation: EvalConfig, model: AnyModelConfig, objective: ObjectiveConfig) -> list[str]:
    if evaluation.translation is None:
        return []
    modes = {d.mode for d in objective.denoisers.values()} if objective.kind == "ul2" else {"S"}
    if objective.kind == "span_corruption" or "S" not in modes:
        return [
            f"eval.translation does not fit objective.kind={objective.kind}"
            f"{' without a denoiser of mode S' if objective.kind == 'ul2' else ''}. Such a model fills gaps and writes "
            "no target of a whole source. Remove it or set objective.kind=seq2seq."
        ]
    if model.layout == "encoder_decoder":
        return []
    return [
        f"eval.translation does not fit model.family={model.family}. Pairs are translated by encoder-decoders. "
        "Remove it or change model.family."
    ]


def _schedule_rules(schedule: ScheduleConfig) -> list[str]:
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


def _health_rules(health: HealthConfig) -> list[str]:
    if health.data_timeout_s < health.collective_timeout_s < health.heartbeat_timeout_s:
        return []
    return [
        f"health.data_timeout_s={health.data_timeout_s:g}, "
        f"health.collective_timeout_s={health.collective_timeout_s:g}, "
        f"health.heartbeat_timeout_s={health.heartbeat_timeout_s:g} do not rise. "
        "The rule is data < collective < heartbeat, so that the cause is named and not its victim. "
        "Set them in rising order."
    ]


def _checkpoint_rules(checkpoint: CheckpointConfig, evaluation: EvalConfig, data: DataConfig) -> list[str]:
    best, problems = checkpoint.keep_best, []
    if best is None:
        return []
    if best.source not in data.validation:
        names = ", ".join(data.validation) or "none"
        problems.append(
            f"checkpoint.keep_best.source={best.source} is not a validation source ({names}). "
            "The best are chosen by what is measured on held-out rows. Name one of data.validation."
        )
    if evaluation.every_steps is None or checkpoint.every_steps % evaluation.every_steps:
        problems.append(
            f"checkpoint.every_steps={checkpoint.every_steps} with eval.every_steps={evaluation.every_steps} leaves "
            "checkpoints without a metric for checkpoint.keep_best. A checkpoint's metric is that of its own step. "
            "Make checkpoint.every_steps a multiple of eval.every_steps."
        )
    return problems


def _engine_rules(engine: EngineConfig, optimizer: OptimizerConfig) -> list[str]:
    problems, stage = [], engine.zero_stage
    if engine.offload_optimizer == "nvme":
        problems.append(
            "engine.offload_optimizer=nvme is not supported. A checkpoint reads the optimizer's state in memory, and "
            "DeepSpeed would move it to files of its own. Set engine.offload_optimizer=cpu."
        )
    elif engine.offload_optimizer == "cpu" and stage == 0:
        problems.append(
            "engine.offload_optimizer=cpu with engine.zero_stage=0. DeepSpeed offloads what ZeRO has partitioned. "
            "Set engine.zero_stage=1 or higher."
        )
    if engine.state_precision == "bf16":
        if stage == 0 or engine.precision != "bf16" or engine.offload_optimizer != "none":
            problems.append(
                f"engine.state_precision=bf16 with engine.zero_stage={stage}, engine.precision={engine.precision}, "
                f"engine.offload_optimizer={engine.offload_optimizer}. DeepSpeed keeps bf16 masters at stages 1 to 3, "
                "precision bf16, without offload. Set engine.state_precision=fp32 or change the others."
            )
        if optimizer.kind == "muon":
            problems.append(
                "engine.state_precision=bf16 with optimizer.kind=muon is not supported. Muon's momentum has a type of "
                "its own. Set engine.state_precision=fp32."
            )
    if optimizer.kind == "muon" and stage == 0:
        problems.append(
            "optimizer.kind=muon with engine.zero_stage=0 is not supported. DeepSpeed clips and checks Muon's updates "
            "where it partitions them. Set engine.zero_stage=1, 2 or 3."
        )
    return problems


def _cluster_rules(cluster: ClusterConfig) -> list[str]:
    problems = [
        f"cluster.environment.{name} looks like a secret. Configs are copied into run directories and shown. "
        f"Set {name} in the environment of the nodes (on this machine: of this shell), or name a file that holds it."
        for name in cluster.environment
        if _SECRET.search(name)
    ]
    if cluster.min_ranks is not None and cluster.min_ranks > cluster.num_ranks:
        problems.append(
            f"cluster.min_ranks={cluster.min_ranks} is above cluster.num_ranks={cluster.num_ranks}. "
            f"A run shrinks from num_ranks. Set cluster.min_ranks={cluster.num_ranks} or less."
        )
    return problems


_RULES: tuple[tuple[tuple[str, ...], Any], ...] = (
    (("batch", "data"), batch_rules),
    (("data",), data_rules),
    (("data", "objective", "health"), raw_rules),
    (("objective", "model"), _objective_rules),
    (("objective", "batch"), _source_length_rules),
    (("objective",), _denoiser_rules),
    (("objective", "batch", "data"), _room_rules),
    (("model", "objective", "batch", "data"), _position_rules),
    (("eval", "data"), _eval_rules),
    (("eval", "data", "cluster"), _checkpoint_eval_rules),
    (("eval", "model", "objective"), _translation_rules),
    (("eval", "model"), _sample_rules),
    (("model",), model_rules),
    (("model",), rope_rules),
    (("model",), learned_position_rules),
    (("model", "optimizer"), mup_rules),
    (("model", "engine", "optimizer"), expert_rules),
    (("schedule",), _schedule_rules),
    (("health",), _health_rules),
    (("checkpoint", "eval", "data"), _checkpoint_rules),
    (("engine", "optimizer"), _engine_rules),
    (("cluster",), _cluster_rules),
)
