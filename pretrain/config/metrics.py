"""The metrics section of the schema: what is measured how often, and who gets it besides the run directory."""

from __future__ import annotations

from typing import Literal

from pretrain.config.section import Section, setting
from pretrain.config.units import Count, Flag, Port, PositiveInt, PositiveReal, Text


class WandbConfig(Section):
    """Weights & Biases sink, off by default and never fatal."""

    mode: Literal["off", "offline", "online"] = setting("off, offline or online", resume="free", default="off")
    project: Text = setting("project", resume="free", default="pretrain")
    entity: Text | None = setting("user or team", resume="free", default=None)
    artifacts: list[Literal["config", "tokenizer", "checkpoints", "export"]] = setting(
        "what is kept there too: the config, the tokenizer, the manifests of durable checkpoints, what "
        "pretrain checkpoint export writes",
        resume="free",
        default=[],
    )


class ProfileConfig(Section):
    """Traces by torch.profiler, for ui.perfetto.dev."""

    steps: list[PositiveInt] = setting("optimizer steps that are traced, from 1", resume="free", default=[])
    ranks: list[Count] = setting("ranks that trace theirs", resume="free", default=[0])


class TrackioConfig(Section):
    """Trackio, a local tracker with a page of its own; off without a project. Needs pretrain[trackers]."""

    project: Text | None = setting("project; none means off", resume="free", default=None)


class PrometheusConfig(Section):
    """Prometheus without the dashboard: rank 0 serves its own last record, or Ray exports it with its metrics."""

    port: Port | None = setting(
        "port of rank 0's own /metrics, 0 for any free one; none means off", resume="free", default=None
    )
    host: Text = setting("address that it listens on", resume="free", default="127.0.0.1")
    through_ray: Flag = setting(
        "the controller also hands its run's series to Ray's metrics, as ray_pretrain_…", resume="free", default=False
    )


class MetricsConfig(Section):
    """What is measured how often and where it goes; JSONL in the run directory always."""

    log_every_steps: PositiveInt = setting("steps between progress lines and records", resume="free", default=1)
    layers_every_steps: PositiveInt | None = setting(
        "steps between looks at norms and attention by layer, taken where such a step is also logged; the masters are "
        "copied to host memory for that step; none means never",
        resume="free",
        default=100,
    )
    peak_flops_per_rank: PositiveReal | None = setting(
        "peak FLOP/s of one rank for MFU; none measures it on CPU and looks it up on CUDA",
        resume="free",
        default=None,
    )
    profile: ProfileConfig = setting("traces of chosen steps and ranks", resume="free", default=ProfileConfig())
    wandb: WandbConfig = setting("Weights & Biases", resume="free", default=WandbConfig())
    tensorboard: Flag = setting(
        "event files for TensorBoard in the run's directory, one folder per attempt; needs pretrain[trackers]",
        resume="free",
        default=False,
    )
    trackio: TrackioConfig = setting("Trackio", resume="free", default=TrackioConfig())
    prometheus: PrometheusConfig = setting("Prometheus", resume="free", default=PrometheusConfig())
