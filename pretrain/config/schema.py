"""The schema of a run: one frozen model per section, nothing unknown, no default for the science.

Each field says with `resume` what a resumed run may do with it:
`free` (changes nothing that is computed), `logged` (may change the numbers from here on; recorded),
`segment` (takes effect at a step boundary, recorded in the data state), `refused`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from pretrain.config.checkpoints import CheckpointConfig as CheckpointConfig
from pretrain.config.checkpoints import KeepBestConfig as KeepBestConfig
from pretrain.config.checkpoints import StartFromConfig as StartFromConfig
from pretrain.config.cluster import ClusterConfig as ClusterConfig
from pretrain.config.evaluation import CheckpointEvalConfig as CheckpointEvalConfig
from pretrain.config.evaluation import EvalConfig as EvalConfig
from pretrain.config.evaluation import SamplesEvalConfig as SamplesEvalConfig
from pretrain.config.evaluation import TranslationEvalConfig as TranslationEvalConfig
from pretrain.config.families import AnyModelConfig as AnyModelConfig
from pretrain.config.families import DecoderConfig as DecoderConfig
from pretrain.config.families import EncoderConfig as EncoderConfig
from pretrain.config.families import EncoderDecoderConfig as EncoderDecoderConfig
from pretrain.config.families import GemmaConfig as GemmaConfig
from pretrain.config.families import GPT2Config as GPT2Config
from pretrain.config.families import Layout as Layout
from pretrain.config.families import LinearRope as LinearRope
from pretrain.config.families import Llama3Rope as Llama3Rope
from pretrain.config.families import ModelConfig as ModelConfig
from pretrain.config.families import MoEConfig as MoEConfig
from pretrain.config.families import MuPConfig as MuPConfig
from pretrain.config.families import NtkRope as NtkRope
from pretrain.config.families import RopeScaling as RopeScaling
from pretrain.config.families import T5Config as T5Config
from pretrain.config.families import YarnRope as YarnRope
from pretrain.config.health import HealthConfig as HealthConfig
from pretrain.config.metrics import MetricsConfig as MetricsConfig
from pretrain.config.metrics import ProfileConfig as ProfileConfig
from pretrain.config.objectives import AnyObjective as AnyObjective
from pretrain.config.objectives import CausalLMObjective as CausalLMObjective
from pretrain.config.objectives import DenoiserConfig as DenoiserConfig
from pretrain.config.objectives import FillInTheMiddleObjective as FillInTheMiddleObjective
from pretrain.config.objectives import MaskedLMObjective as MaskedLMObjective
from pretrain.config.objectives import ObjectiveConfig as ObjectiveConfig
from pretrain.config.objectives import PrefixLMObjective as PrefixLMObjective
from pretrain.config.objectives import Seq2SeqObjective as Seq2SeqObjective
from pretrain.config.objectives import SpanCorruptionObjective as SpanCorruptionObjective
from pretrain.config.objectives import UL2Objective as UL2Objective
from pretrain.config.section import ResumePolicy as ResumePolicy
from pretrain.config.section import Section, setting
from pretrain.config.units import (
    Bytes,
    Count,
    Flag,
    Fraction,
    Location,
    NonNegativeReal,
    PositiveInt,
    PositiveReal,
    Text,
    parse_count,
)

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
ZeroStage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(parse_count)]


# ---------------------------------------------------------------------------------------------- data


class SourceConfig(Section):
    """One built source (a directory with manifest.json)."""

    path: Location = setting(
        "directory or URL that holds manifest.json; may move, its content may not change", resume="logged"
    )
    weight: PositiveReal = setting(
        "share of the rows; weights are relative and need not sum to 1", resume="segment", default=1.0
    )
    max_epochs: PositiveReal | None = setting(
        "times that it is read at most; then it rests and the others share its rows; none means no end",
        resume="segment",
        default=None,
    )


class StageConfig(Section):
    """From a mark on, how the sources are mixed and how many rows of which length make a step.

    Begins where a step does; each source goes on at its next row. What is not given stays as it was.
    """

    from_step: Count | None = setting("optimizer step, from 0; or give from_tokens", resume="segment", default=None)
    from_tokens: Count | None = setting(
        "token slots (rows x their length) before it; the first step behind them",
        resume="segment",
        default=None,
    )
    weights: dict[str, PositiveReal] | None = setting(
        "shares by name of a source under data.sources; those without one rest",
        resume="segment",
        default=None,
        min_length=1,
    )
    global_batch_size: PositiveInt | None = setting("rows per optimizer step", resume="segment", default=None)
    micro_batch_size: PositiveInt | None = setting(
        "rows per micro-batch; divides global_batch_size", resume="segment", default=None
    )
    sequence_length: PositiveInt | None = setting(
        "tokens of text per row; divides the longest of the run, and so does it the tokens of a step",
        resume="segment",
        default=None,
    )


class DataConfig(Section):
    """What is read and in which order."""

    sources: dict[str, SourceConfig] = setting(
        "training sources by name; the order of rows depends on the names; new ones may come, none may go",
        resume="segment",
        min_length=1,
    )
    validation: dict[str, SourceConfig] = setting(
        "held-out sources by name; weights are ignored", resume="free", default={}
    )
    stages: list[StageConfig] = setting(
        "later mixtures, batch sizes and row lengths, in the order of their marks; before the first, the weights of "
        "data.sources and the batch section hold",
        resume="segment",
        default=[],
    )
    skip_rows: list[tuple[Count, Count]] = setting(
        "ranges [first, end) of global rows (of the run's longest length) that are jumped over; each begins where a "
        "step does",
        resume="segment",
        default=[],
    )
    reading: Literal["blocks", "raw"] = setting(
        "blocks = built sources; raw = WebDataset tars of text (.txt, .json members), tokenised by every rank as they "
        "are read, for experiments: a source's path is then a directory of .tar files or a pattern",
        resume="refused",
        default="blocks",
    )
    lanes: PositiveInt = setting(
        "parallel streams L that the rows are dealt from: a power of two that divides the rows of a block; "
        "0.25 x global_batch_size or less keeps the mixture near exact within a batch",
        resume="refused",
        default=8,
    )
    window_blocks: PositiveInt = setting(
        "blocks W of a lane whose rows are permuted together", resume="refused", default=2
    )
    on_corrupt: Literal["raise", "mask"] = setting(
        "a block that stays corrupt after one refetch ends the run (raise) or its labels are ignored and "
        "counted (mask)",
        resume="logged",
        default="raise",
    )
    cache: Location | None = setting("directory for blocks fetched from remote sources", resume="free", default=None)
    cache_bytes: Bytes = setting("size of that cache in bytes", resume="free", default=20 * 2**30)
    prefetch_steps: PositiveInt = setting(
        "steps read ahead by the prefetch thread; more where steps are small and local", resume="free", default=2
    )


# ------------------------------------------------------------------------------------------ training


class BatchConfig(Section):
    """How many rows make a step. The global batch is constant in rows whatever the ranks; data.stages change it."""

    global_batch_size: PositiveInt = setting("rows per optimizer step", resume="segment")
    micro_batch_size: PositiveInt = setting(
        "rows m per micro-batch, the unit of work; divides global_batch_size; part of the numerics",
        resume="refused",
    )
    sequence_length: PositiveInt = setting(
        "tokens S of text per row; divides the block of a plain source; the target capacity of a pair source; a resume "
        "may change it to a divisor of the longest so far",
        resume="segment",
    )
    source_length: PositiveInt | None = setting(
        "source tokens per row of a pair source (its source capacity)", resume="refused", default=None
    )


class LossConfig(Section):
    """The training loss, summed over targets and divided once by their global number."""

    label_smoothing: Fraction = setting("epsilon of label smoothing", resume="logged", default=0.0, lt=1)
    z_loss: NonNegativeReal = setting("weight of logsumexp^2", resume="logged", default=0.0)
    # Not free: the gradient of the output matrix is summed chunk by chunk, so other chunks round otherwise.
    chunk_rows: PositiveInt = setting("target rows per chunk of the fused loss", resume="logged", default=1024)


class AdamWConfig(Section):
    """AdamW with decoupled weight decay on matrices only (no norms, no biases)."""

    kind: Literal["adamw"] = "adamw"
    learning_rate: PositiveReal = setting("peak learning rate", resume="logged")
    weight_decay: NonNegativeReal = setting("decay of matrices and embeddings", resume="logged", default=0.1)
    beta1: Fraction = setting("decay of the first moment", resume="logged", default=0.9, lt=1)
    beta2: Fraction = setting("decay of the second moment", resume="logged", default=0.95, lt=1)
    eps: PositiveReal = setting("epsilon in the denominator", resume="logged", default=1e-8)
    gradient_clipping: NonNegativeReal = setting(
        "maximum global gradient norm; 0 means no clipping", resume="logged", default=1.0
    )


class SGDConfig(Section):
    """Plain stochastic gradient descent, mostly for tests of the scaling."""

    kind: Literal["sgd"] = "sgd"
    learning_rate: PositiveReal = setting("peak learning rate", resume="logged")
    weight_decay: NonNegativeReal = setting("decay of matrices and embeddings", resume="logged", default=0.0)
    momentum: Fraction = setting("momentum", resume="logged", default=0.0, lt=1)
    gradient_clipping: NonNegativeReal = setting(
        "maximum global gradient norm; 0 means no clipping", resume="logged", default=1.0
    )


class MuonConfig(Section):
    """Muon for the weights of linear layers, AdamW for embeddings, output, norms and biases; ZeRO stages 1 to 3."""

    kind: Literal["muon"] = "muon"
    learning_rate: PositiveReal = setting("peak learning rate of the linear layers", resume="logged")
    adam_learning_rate: PositiveReal = setting("peak learning rate of all else, on the same schedule", resume="logged")
    weight_decay: NonNegativeReal = setting("decay of matrices and embeddings", resume="logged", default=0.1)
    momentum: Fraction = setting("momentum of Muon", resume="logged", default=0.95, lt=1)
    beta1: Fraction = setting("AdamW: decay of the first moment", resume="logged", default=0.9, lt=1)
    beta2: Fraction = setting("AdamW: decay of the second moment", resume="logged", default=0.95, lt=1)
    eps: PositiveReal = setting("AdamW: epsilon in the denominator", resume="logged", default=1e-8)
    gradient_clipping: NonNegativeReal = setting(
        "maximum global norm of Muon's updates and AdamW's gradients together; 0 means no clipping",
        resume="logged",
        default=0.0,
    )


OptimizerConfig = Annotated[AdamWConfig | SGDConfig | MuonConfig, Field(discriminator="kind")]


class ScheduleConfig(Section):
    """Learning rate as a pure function of the optimizer step, and the length of the run."""

    kind: Literal["constant", "cosine", "wsd", "inverse_sqrt"] = setting(
        "shape after the warm-up; wsd = warm-up, stable, decay", resume="logged"
    )
    total_steps: PositiveInt = setting("optimizer steps of the run", resume="logged")
    warmup_steps: Count = setting("steps of linear warm-up from 0", resume="logged", default=0)
    decay_steps: Count = setting("last steps that decay linearly (wsd only)", resume="logged", default=0)
    final_fraction: Fraction = setting(
        "learning rate at the end as a fraction of the peak (cosine, wsd)", resume="logged", default=0.1
    )


class EngineConfig(Section):
    """How DeepSpeed shards and computes."""

    zero_stage: ZeroStage = setting("ZeRO stage", resume="logged", default=2)
    precision: Literal["bf16", "fp32"] = setting(
        "bf16 = bf16 weights and gradients with fp32 masters", resume="logged", default="bf16"
    )
    state_precision: Literal["fp32", "bf16"] = setting(
        "bf16 = masters and optimizer state in bf16 too: a third of the memory, and updates below a bf16 step of a "
        "weight are lost; stages 1 to 3 with precision bf16",
        resume="logged",
        default="fp32",
    )
    offload_optimizer: Literal["none", "cpu", "nvme"] = setting(
        "where masters and optimizer state live and are updated: on the device (none) or in host memory (cpu); "
        "stages 1 to 3",
        resume="free",
        default="none",
    )
    activation_checkpointing: Flag = setting("recompute layers in the backward pass", resume="logged", default=False)
    reduce_bucket_elements: PositiveInt = setting(
        "gradient elements reduced at once", resume="logged", default=5_000_000
    )
    allgather_bucket_elements: PositiveInt = setting(
        "weight elements gathered at once", resume="logged", default=5_000_000
    )
    persistence_threshold_elements: Count = setting(
        "stage 3: parameters with fewer elements stay whole on every rank", resume="free", default=100_000
    )
    reduce_once: Flag = setting(
        "stages 2 and 3: keep the whole gradient until the step's last micro-batch and reduce it once, instead of "
        "after every backward pass; less traffic for the memory of one full gradient",
        resume="logged",
        default=False,
    )
    expert_parallel_size: PositiveInt = setting(
        "ranks that share the experts of a layer, each holding a part; with a number of ranks that it does not divide, "
        "their largest common divisor; stages 1 and 2",
        resume="logged",
        default=1,
    )
    overlap_communication: Flag = setting("reduce while the backward pass runs (CUDA)", resume="logged", default=False)


class RunConfig(Section):
    """A whole run, as one YAML file describes it."""

    name: Text = setting(
        "name of the run: letters, digits, dot, dash, underscore",
        resume="logged",  # it is the directory's name: it only differs where somebody renamed that
        pattern=NAME_PATTERN,
    )
    seed: Count = setting("seed of everything random", resume="refused", lt=2**63)
    tokenizer: Location = setting("tokenizer.json", resume="refused")
    data: DataConfig
    objective: ObjectiveConfig = CausalLMObjective()
    model: AnyModelConfig
    batch: BatchConfig
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    engine: EngineConfig = EngineConfig()
    checkpoint: CheckpointConfig
    health: HealthConfig = HealthConfig()
    eval: EvalConfig = EvalConfig()
    metrics: MetricsConfig = MetricsConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _sections_fit_each_other(self) -> RunConfig:
        from pretrain.config.rules import broken_rules

        problems = broken_rules({name: getattr(self, name) for name in type(self).model_fields})
        if problems:
            raise ValueError("\n".join(problems))
        return self
