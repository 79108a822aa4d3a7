"""The checkpoint section of a run: when its state is saved, what is kept, and what it may begin with."""

from __future__ import annotations

from typing import Literal

from pretrain.config.section import Section, setting
from pretrain.config.units import Count, Flag, Location, PositiveInt, PositiveReal, Text


class KeepBestConfig(Section):
    """Which checkpoints count as the best; metrics are measured by the validation of the same step."""

    source: Text = setting("validation source", resume="free")
    metric: Literal["loss", "bits_per_byte"] = setting("what is compared; smaller is better", resume="free")
    count: PositiveInt = setting("how many are kept", resume="free", default=1)


class StartFromConfig(Section):
    """Another run's checkpoint that this run begins with; it counts from step 0 and reads its data from the start."""

    run: Location = setting("directory or URL of the other run", resume="refused")
    checkpoint: Text = setting(
        "name of its checkpoint, as `pretrain checkpoint list` shows it: a restart before the first save must find "
        "the same one",
        resume="refused",
    )
    optimizer: Literal["fresh", "keep"] = setting(
        "begin with a fresh optimizer, or keep its state and step count", resume="refused"
    )
    only: tuple[Text, ...] = setting(
        "patterns (*, ?) of the names of parameters that are taken over; the others stay as initialised",
        resume="refused",
        default=("*",),
    )
    leave_out: tuple[Text, ...] = setting(
        "patterns of names that are not taken over although `only` matches", resume="refused", default=()
    )


class CheckpointConfig(Section):
    """When the state is saved and what is kept. The last good checkpoint is never deleted."""

    every_steps: PositiveInt = setting("steps between durable checkpoints", resume="free")
    every: Literal["fixed", "auto"] = setting(
        "fixed: by every_steps and every_minutes; auto: also as soon as the time has passed that loses least to saves "
        "and to repeated work, from the measured cost of a save and rate of failures (Daly 2006)",
        resume="free",
        default="fixed",
    )
    expected_failure_hours: PositiveReal = setting(
        "hours between two failures of the whole run, until the run has measured its own", resume="free", default=24.0
    )
    every_minutes: PositiveReal | None = setting(
        "minutes between durable checkpoints, by the clock of rank 0, where that is sooner than every_steps; "
        "none means by steps only",
        resume="free",
        default=None,
    )
    directory: Location | None = setting(
        "directory or URL (s3://, gs://) of this run's checkpoints; none means checkpoints/ in the run's directory. "
        "Any object store will do: nothing is renamed, and no conditional PUT is needed",
        resume="refused",
        default=None,
    )
    start_from: StartFromConfig | None = setting(
        "weights to begin with, from another run; used while this run has no state of its own; none means as "
        "initialised",
        resume="refused",
        default=None,
    )
    max_save_failures: Count = setting(
        "durable saves in a row that may fail before the run ends; each is told, and the next one tries again",
        resume="free",
        default=3,
    )
    keep_last: PositiveInt = setting("newest checkpoints that are kept", resume="free", default=2)
    keep_every_steps: PositiveInt | None = setting(
        "checkpoints of a step that is a multiple of this are kept for good", resume="free", default=None
    )
    keep_best: KeepBestConfig | None = setting(
        "the best by a validation metric are kept as well", resume="free", default=None
    )
    ram_every_steps: PositiveInt | None = setting(
        "steps between copies in the memory of the nodes, which outlive the processes; "
        "two copies are kept; none means no copies in memory",
        resume="free",
        default=None,
    )
    ram_partner: Flag = setting(
        "with two nodes or more, each keeps a second copy of another's part, so that a lost node loses no copy; twice "
        "the memory",
        resume="free",
        default=True,
    )
    ram_directory: Location = setting(
        "directory of those copies on every node, on a tmpfs that holds two", resume="free", default="/dev/shm"
    )
