"""The health section of the schema: bounds of phases, bad steps and what is done about them."""

from __future__ import annotations

from pretrain.config.section import Section, setting
from pretrain.config.units import Count, Flag, Fraction, PositiveInt, PositiveReal, Seconds


class HealthConfig(Section):
    """Bounds of phases and of bad steps. Timeouts rise: data < collective < heartbeat."""

    max_skipped_steps: Count = setting(
        "consecutive steps skipped for a non-finite gradient before the run ends", resume="free", default=10
    )
    rerun_suspicious_steps: Flag = setting(
        "compute a bad step once more before anything is done about it: only what is bad again is the data's fault",
        resume="free",
        default=True,
    )
    spike_z_score: PositiveReal | None = setting(
        "robust standard deviations above the median of the last good steps from which a loss or gradient norm is a "
        "spike: the run goes back to a checkpoint and jumps over the step's rows; none means only what is not finite",
        resume="logged",
        default=None,
    )
    spike_window_steps: PositiveInt = setting(
        "good steps that a spike is measured against; nothing is judged before half of them are known",
        resume="logged",
        default=64,
        ge=4,
    )
    max_rollbacks: Count = setting(
        "how often the run may go back to a checkpoint and jump over rows before it ends", resume="free", default=2
    )
    rollback_learning_rate_factor: Fraction = setting(
        "factor on the learning rate for each time that rows were jumped over, from then on",
        resume="logged",
        default=1.0,
        gt=0,
        le=1,
    )
    data_timeout_s: Seconds = setting("longest wait for a step's rows", resume="free", default=60.0)
    collective_timeout_s: Seconds = setting("longest wait in a collective", resume="free", default=120.0)
    heartbeat_timeout_s: Seconds = setting("a rank silent for longer is killed as hung", resume="free", default=180.0)
    learned_deadlines: Flag = setting(
        "also kill a rank as hung when it is silent for 3 times the longest of the last steps plus 2 s (saving and "
        "validation by their own times), as soon as enough steps are known",
        resume="free",
        default=True,
    )
    start_timeout_s: Seconds = setting("longest start of a rank, imports included", resume="free", default=300.0)
