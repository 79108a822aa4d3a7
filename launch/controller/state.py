"""What the controller knows, sees and does, as values. PURE: no clock, no process, no Ray.

Takes → gives: `Observation` (what happened since the last look) goes into `policy.decide`, which
gives the next `RunState` and the `Action`s that the controller carries out.
Times are seconds of one monotonic clock. Own design (DESIGN section 7).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    """Where the controller is."""

    PLACING = "placing"  # slots are asked for; no rank process exists
    RUNNING = "running"  # the ranks of an attempt were told to start
    EXAMINING = "examining"  # a rank hangs; the stacks of all ranks are being gathered
    SUSPECTING = "suspecting"  # ranks ended because a peer failed; the culprit is still being waited for
    KILLING = "killing"  # the attempt is over; its remaining ranks are being killed
    WAITING = "waiting"  # all ranks are gone; the next attempt starts after the backoff
    ENDED = "ended"  # the run is over for this controller


class Cause(StrEnum):
    """Whose budget a failure is charged to."""

    APPLICATION = "application"  # a rank ended by its own fault or by a signal that was not ours
    NODE = "node"  # an agent, a node or the way to it is gone
    HANG = "hang"  # a rank was silent for too long


class Stop(StrEnum):
    """How somebody asked the run to end; a later one of this list overrides an earlier one."""

    INTERRUPT = "interrupt"  # Ctrl-C or SIGTERM: save, exit 5
    STOP = "stop"  # `pretrain stop`: save, exit 4
    NOW = "now"  # `pretrain stop --now`: kill, exit 4
    ABORT = "abort"  # a second Ctrl-C: kill, exit 5


@dataclass(frozen=True, slots=True)
class Limits:
    """What the policy may spend, from `config.cluster` and `config.health`."""

    num_ranks: int
    min_ranks: int
    max_failures: Mapping[Cause, int]
    backoff_s: float
    heartbeat_timeout_s: float
    start_timeout_s: float
    max_backoff_s: float = 60.0
    crash_loop: int = 3  # crashes in a row at one step that end the run
    suspect_grace_s: float = 4.0  # wait for the culprit when only its victims ended (a silent node takes 3 s)
    kill_grace_s: float = 15.0  # wait for killed ranks to be gone
    placing_grace_s: float = 5.0  # wait for all ranks before starting with fewer
    stop_timeout_s: float = 600.0  # from asking ranks to save until they are killed
    time_limit_s: float | None = None  # from the first look until the ranks are asked to save
    standbys: bool = False  # keep a standby for every rank
    learned_deadlines: bool = False  # judge silence by the run's own times
    data_timeout_s: float = 60.0  # the loader gives up by itself after so long
    sleepless_s: float = math.inf  # a look so much after the last one says nothing about the ranks' silence
    examine_s: float = 1.0  # wait for the stacks of all ranks before a hung attempt is killed
    straggler_factor: float = 1.5  # a rank whose own work takes so many times the others' is told
    straggler_least_s: float = 0.01


@dataclass(frozen=True, slots=True)
class RankExit:
    """A rank process ended."""

    rank: int
    code: int
    tail: str = ""  # last lines of its log


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat of a rank."""

    rank: int
    phase: str
    step: int
    collective: int = 0
    t: float | None = None  # the rank's own clock
    own_s: float | None = None  # its own work in the step before: waiting for data, forward pass


@dataclass(frozen=True, slots=True)
class RankStack:
    """What a rank was doing when it was asked: the state of its process (R, S, D, T, Z) and its threads."""

    rank: int
    process_state: str
    text: str


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """The last durations of each phase, all ranks together."""

    seconds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Observation:
    """What happened since the last look."""

    free_ranks: int | None = None  # ranks that could be placed now; None while unknown
    placed: tuple[str, ...] | None = None  # host of each rank that slots were got for
    place_failed: str | None = None  # slots could not be got; try again
    start_failed: str | None = None  # a rank could not be spawned; the text says why
    exits: tuple[RankExit, ...] = ()
    beats: tuple[Beat, ...] = ()
    lost: Mapping[int, str] = field(default_factory=dict)  # rank -> what was lost (its agent went silent)
    unheard: frozenset[int] = frozenset()  # ranks whose agent says nothing just now: their silence is not theirs
    stacks: tuple[RankStack, ...] = ()
    committed_step: int | None = None
    stop: Stop | None = None
    fenced: str | None = None  # the lease went to somebody else


@dataclass(frozen=True, slots=True)
class RankView:
    """What is known of one rank of the attempt."""

    spawned_t: float
    heard_t: float
    host: str = ""
    phase: str = "start"
    step: int = 0
    first_step: int | None = None  # step of its first beat out of the start phase
    collective: int = 0
    beat_t: float = 0.0  # the rank's clock at its last beat
    phase_t: float = 0.0  # and at the beginning of its phase
    step_s: float = 0.0  # of the present step so far
    own: tuple[float, ...] = ()  # its own work in the last steps
    exit: RankExit | None = None
    gone: bool = False  # ended, or lost with its node

    @property
    def trained(self) -> bool:
        """It has come through at least one step of this attempt."""
        return self.first_step is not None and self.step > self.first_step


@dataclass(frozen=True, slots=True)
class Fault:
    """Why an attempt failed: one line, and the last lines of the log of the rank to blame."""

    cause: Cause
    message: str
    tail: str = ""
    rank: int | None = None
    exit_code: int | None = None
    step: int | None = None

    @property
    def text(self) -> str:
        """The message with the log's last lines."""
        return f"{self.message}. Last lines of its log:\n{self.tail}" if self.tail else self.message


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ends: a terminal journal event and the exit code of the controller."""

    event: str  # completed | stopped | interrupted | failed | fenced
    exit_code: int
    step: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RunState:
    """Everything that a decision depends on."""

    phase: Phase = Phase.PLACING
    since_t: float = 0.0  # when the phase began
    attempt: int = 0  # number of the current or last attempt
    asked: bool = False  # slots were asked for and no answer has come yet
    standing_by: bool = False  # standbys were asked for in this attempt
    ranks: Mapping[int, RankView] = field(default_factory=dict)
    failures: Mapping[Cause, int] = field(default_factory=dict)  # since the last committed progress
    committed_step: int = -1
    crash_step: int | None = None  # where the last crash was
    crashes: int = 0  # crashes in a row there
    retry_t: float = 0.0  # the next attempt starts not before
    stop: Stop | None = None
    stop_t: float = 0.0
    began_t: float | None = None  # the first look
    looked_t: float | None = None
    times: PhaseTimes = field(default_factory=PhaseTimes)
    suspected: Fault | None = None  # the hang that is being examined
    stacks: Mapping[int, RankStack] = field(default_factory=dict)
    slow: frozenset[int] = frozenset()  # ranks that were told as stragglers
    why: str = "first start"  # why the next attempt starts
    outcome: Outcome | None = None  # decided; carried out when the ranks are gone

    @property
    def step(self) -> int | None:
        """The furthest step that a rank of this attempt has begun."""
        steps = [view.step for view in self.ranks.values() if view.first_step is not None]
        return max(steps) if steps else None


@dataclass(frozen=True, slots=True)
class Place:
    """Get slots for `num_ranks` ranks; the answer is `placed` or `place_failed`."""

    num_ranks: int


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Spawn the ranks of a new attempt on the slots that were got."""

    attempt: int
    num_ranks: int
    why: str


@dataclass(frozen=True, slots=True)
class StandBy:
    """Have a standby made for every rank: the attempt trains, and the next one should start from warm processes."""


@dataclass(frozen=True, slots=True)
class TakeStacks:
    """Ask every rank for its stacks."""


@dataclass(frozen=True, slots=True)
class RecordStraggler:
    """Tell that a rank is slower than the others: seconds of its own work per step, median and 90 %."""

    attempt: int
    rank: int
    host: str
    median_s: float
    p90_s: float
    others_median_s: float


@dataclass(frozen=True, slots=True)
class AskRanks:
    """Send `stop` or `drain` to every rank."""

    word: str


@dataclass(frozen=True, slots=True)
class KillRanks:
    """SIGKILL every rank of the attempt that still lives. The reason is empty where a fault tells it."""

    reason: str


@dataclass(frozen=True, slots=True)
class RecordFault:
    """Write a fault into the journal and tell the user."""

    attempt: int
    fault: Fault
    plan: str  # what happens next, in words
    report: str = ""  # all ranks on one page, where a hang was examined


@dataclass(frozen=True, slots=True)
class RecordEnd:
    """Write the end of an attempt into the journal."""

    attempt: int
    outcome: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over for this controller."""

    outcome: Outcome


Action = (
    Place
    | StartRanks
    | StandBy
    | TakeStacks
    | RecordStraggler
    | AskRanks
    | KillRanks
    | RecordFault
    | RecordEnd
    | Finish
)
