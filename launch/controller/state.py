"""What the controller knows, sees and does, as values. PURE: no clock, no process, no Ray.

Takes → gives: `Observation` (what happened since the last look) goes into `policy.decide`, which
gives the next `RunState` and the `Action`s that the controller carries out.
Times are seconds of one monotonic clock. Own design (DESIGN section 7). `Phase` draws the transitions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from launch.controller.offers import NO_SLOTS, Seat, Slots


class Phase(StrEnum):
    """Where the controller is.

        PLACING ──slots──► RUNNING ──a peer failed──► SUSPECTING
           ▲                │ ▲ │ fault, stop --now       │ culprit, or nobody within the grace
           │        silence │ │ └────────► KILLING ◄──────┘
           │    heard again ▼ │              ▲  │
           │             EXAMINING ──stacks──┘  │ all gone
        retry_t                                 ▼
           └──────────── WAITING ◄──────────────┘
                            ▲ RUNNING, when all ranks have saved to move
    ENDED follows RUNNING when all ranks ended well, KILLING when the fault or a request ends the run, and
    PLACING or WAITING on a request, a lost lease, or when no slots are to be had in time. A move is what a
    run does without a fault: to more ranks, or off a node that leaves; its ranks save and end, so that no
    step is done twice.
    """

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
    PREEMPTION = "preemption"  # a node that had said that it leaves is gone, or its ranks were asked to end


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
    spare_ranks: int = 0  # slots that are held beyond num_ranks
    one_host: bool = False  # all slots are on the controller's own host
    max_backoff_s: float = 60.0
    crash_loop: int = 3  # crashes in a row at one step that end the run
    suspect_grace_s: float = 4.0  # wait for the culprit when only its victims ended (a silent node takes 3 s)
    killed_grace_s: float = 0.0  # the agent of a killed rank must live on so long, or its node is what was lost
    kill_grace_s: float = 15.0  # wait for killed ranks to be gone
    placing_grace_s: float = 5.0  # wait for all ranks before the first attempt starts with fewer
    stop_timeout_s: float = 600.0  # from asking ranks to save until they are killed
    time_limit_s: float | None = None  # from the first look until the ranks are asked to save
    standbys: bool = False  # keep a standby for every rank
    evaluates: bool = False  # measure checkpoints on a slot that no rank has
    learned_deadlines: bool = False  # judge silence by the run's own times
    sleepless_s: float = math.inf  # a look so much after the last one says nothing about the ranks' silence
    examine_s: float = 1.0  # wait for the stacks of all ranks before a hung attempt is killed
    straggler_factor: float = 1.5  # a rank whose own work takes so many times the others' is told
    straggler_least_s: float = 0.01
    standbys_within_s: float = 60.0  # a move to more ranks waits so long for their standbys
    drain_margin_s: float = 60.0  # a leaving node is left so long before it goes, or when there is a replacement
    quarantine_faults: int = 3  # of one host within the window, after which it is left out
    quarantine_window_s: float = 86400.0
    table_timeout_s: float = 60.0  # longest time without any knowledge of slots while none are held
    slots_timeout_s: float = 3600.0  # longest wait for min_ranks slots
    flap_s: float = 600.0  # a node lost so soon after the run grew doubles the wait before it grows again


class RankExit(NamedTuple):
    """A rank process ended."""

    rank: int
    code: int
    tail: str = ""  # last lines of its log


class Beat(NamedTuple):
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

    held: Slots = NO_SLOTS  # slots on living agents
    offers: Slots | None = None  # slots that could be taken besides; None while unknown
    placed: tuple[Seat, ...] | None = None  # seat of each rank that slots were got for
    place_failed: str | None = None  # slots could not be got; try again
    start_failed: str | None = None  # a rank could not be spawned; the text says why
    exits: tuple[RankExit, ...] = ()
    beats: tuple[Beat, ...] = ()
    lost: Mapping[int, str] = field(default_factory=dict)  # rank -> what was lost (its agent went silent)
    unheard: frozenset[int] = frozenset()  # ranks whose agent says nothing just now: their silence is not theirs
    is_part: bool = False  # of the news: who seems silent may only not have been read yet
    stacks: tuple[RankStack, ...] = ()
    standbys: int | None = None  # slots whose standbys are ready
    evaluator_code: int | None = None  # the process that measures checkpoints ended; 0 also where its slot was needed
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
    node: str = ""
    exit_t: float = 0.0

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
    host: str = ""  # of the rank to blame

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
class Growth:
    """When more slots are looked for, and when they are used."""

    standing: int = 0  # slots that standbys were asked for in this attempt
    ready: int = 0  # slots whose standbys are ready
    full_t: float | None = None  # since when there are slots for more ranks than run
    look_t: float = 0.0  # more slots are asked for not before
    grown_t: float | None = None  # when the run last moved to more ranks
    wait_s: float = 0.0  # between two such moves; doubles while nodes flap


@dataclass(frozen=True, slots=True)
class RunState:
    """Everything that a decision depends on."""

    phase: Phase = Phase.PLACING
    since_t: float = 0.0  # when the phase began
    attempt: int = 0  # number of the current or last attempt
    started: bool = False  # an attempt was started by this controller
    exited: bool = False  # a rank of this attempt has ended
    trained: bool = False  # every rank of this attempt has come through a step
    asked: bool = False  # slots were asked for and no answer has come yet
    known_t: float | None = None  # when slots were last known of
    judged_t: float = 0.0  # when the silence of all ranks was last looked at
    compared_t: float = 0.0  # and their speed
    ranks: Mapping[int, RankView] = field(default_factory=dict)
    excused: Mapping[int, float] = field(default_factory=dict)  # rank -> until when its silence does not count
    failures: Mapping[Cause, int] = field(default_factory=dict)  # since the last committed progress
    evidence: Mapping[str, tuple[tuple[float, str], ...]] = field(default_factory=dict)  # host -> faults blamed on it
    quarantined: frozenset[str] = frozenset()  # hosts that get no ranks any more
    leaving: frozenset[str] = frozenset()  # nodes that have said that they go
    committed_step: int = -1
    crash_step: int | None = None  # where the last crash was
    crash_host: str = ""  # and on which host, if all of the crashes in a row were there
    crashes: int = 0  # crashes in a row there
    retry_t: float = 0.0  # the next attempt starts not before
    moving: str = ""  # why the ranks were asked to save and end, the run going on elsewhere
    growth: Growth = Growth()
    evaluating: bool = False  # a process that measures checkpoints was ordered and has not ended
    evaluate_t: float = 0.0  # the next one not before
    evaluator_failures: int = 0  # in a row
    stop: Stop | None = None
    stop_t: float = 0.0
    began_t: float | None = None  # the first look
    looked_t: float | None = None
    times: PhaseTimes = field(default_factory=PhaseTimes)
    suspected: Fault | None = None  # the hang that is being examined
    stacks: Mapping[int, RankStack] = field(default_factory=dict)  # that were asked for, and of stopped processes
    slow: frozenset[int] = frozenset()  # ranks that were told as stragglers
    why: str = "first start"  # why the next attempt starts
    outcome: Outcome | None = None  # decided; carried out when the ranks are gone

    def heard_t(self, rank: int) -> float:
        """Since when a rank has been silent, as far as it is to blame for that."""
        return max(self.ranks[rank].heard_t, self.excused.get(rank, 0.0))

    @property
    def step(self) -> int | None:
        """The furthest step that a rank of this attempt has begun."""
        steps = [view.step for view in self.ranks.values() if view.first_step is not None]
        return max(steps) if steps else None


@dataclass(frozen=True, slots=True)
class Place:
    """Have slots for `num_ranks` ranks, those that are held included; the answer is `placed` or `place_failed`.

    Attributes:
        without: hosts that are not taken, and given up where they are held; as are nodes that leave.
        keep: nothing is given up, ranks train there.
    """

    num_ranks: int
    without: frozenset[str] = frozenset()
    keep: bool = False


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Spawn the ranks of a new attempt on the slots that were got."""

    attempt: int
    num_ranks: int
    why: str


@dataclass(frozen=True, slots=True)
class StandBy:
    """Have a standby made for every slot: the attempt trains, and the next one should start from warm processes."""


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Have a process measure the run's checkpoints on a slot that no rank has, as long as it is free."""


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
class Quarantine:
    """Write into the journal that a host gets no ranks any more, and tell the user why."""

    host: str
    evidence: tuple[str, ...]


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
    | Evaluate
    | TakeStacks
    | RecordStraggler
    | AskRanks
    | KillRanks
    | RecordFault
    | Quarantine
    | RecordEnd
    | Finish
)
