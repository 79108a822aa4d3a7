"""The cluster section of the schema: where ranks run, how many, and how often which failure is forgiven."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pretrain.config.cluster_targets import ClusterTargets
from pretrain.config.section import setting
from pretrain.config.units import Count, Flag, PositiveInt, Seconds


class ClusterConfig(ClusterTargets):
    """Where the ranks run and how often which failure is forgiven."""

    num_ranks: PositiveInt = setting("data-parallel ranks R", resume="logged", default=1)
    min_ranks: PositiveInt | None = setting(
        "fewest ranks that the run may shrink to; none means num_ranks", resume="free", default=None
    )
    device: Literal["cpu", "cuda"] = setting("device of a rank", resume="logged", default="cpu")
    threads_per_rank: PositiveInt = setting("CPU threads of a rank (OMP)", resume="logged", default=1)
    max_application_failures: Count = setting(
        "restarts for a rank's own faults, counted since the last committed progress", resume="free", default=3
    )
    max_node_failures: Count = setting("restarts for lost nodes, counted likewise", resume="free", default=10)
    max_hangs: Count = setting("restarts for hung ranks, counted likewise", resume="free", default=3)
    max_preemptions: Count = setting(
        "restarts because a node was taken away by its owner, counted likewise", resume="free", default=100
    )
    quarantine_faults: Annotated[PositiveInt, Field(ge=2)] = setting(
        "faults of one host within a day after which it gets no ranks any more, if the others suffice",
        resume="free",
        default=3,
    )
    spare_ranks: Count = setting(
        "slots that are held, with standbys, beyond num_ranks, so that a lost node is replaced at once",
        resume="free",
        default=0,
    )
    slots_timeout_s: Seconds = setting(
        "longest wait for slots for min_ranks; then the run ends as interrupted and can be resumed",
        resume="free",
        default=3600.0,
    )
    backoff_s: Seconds = setting("first wait before a restart; doubles, up to 60 s", resume="free", default=0.5)
    standbys: Flag = setting(
        "keep a process per rank that has imported everything (0.3 GB each), so that a restart takes a second",
        resume="free",
        default=True,
    )
    time_limit_s: Seconds | None = setting(
        "seconds from the start of this command until the run saves, ends with exit code 5 and can be resumed; "
        "none means no limit",
        resume="free",
        default=None,
    )
    stop_grace_s: Seconds = setting(
        "seconds that ranks have to save when the run is asked to end; then they are killed",
        resume="free",
        default=600.0,
    )
    environment: dict[str, str] = setting("extra environment of the ranks", resume="logged", default={})
