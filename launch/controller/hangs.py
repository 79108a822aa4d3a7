"""Which rank hangs, judged by deadlines that the run itself teaches. PURE.

takes → heartbeats, stacks; gives → durations of phases, the rank over its deadline, the odd one out, a report.
A hang is to be known, with all stacks, within 3 times the longest of the last steps plus 2 s. A rank that waits for
rows says so twice a second, so its silence means the same as in a step; copies of the state have the like from their
own times, and phases that wait for disks 10 s more, unless the rank's process is stopped. `heartbeat_timeout_s` bounds
all and holds until enough is known. The first step of a new shape may compile, has the bound of a start, and makes
what was known of steps void. Of ranks that wait for each other only those that are furthest behind (by the number of
their collective) are judged: who waits for a slow disk of another rank hangs not.
Own design (DESIGN section 7).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from launch.controller.state import Beat, Cause, Fault, Limits, PhaseTimes, RankStack, RankView, RunState

_STEP_PHASES = ("data", "step")
_COMPUTING = (*_STEP_PHASES, "copy")  # nothing in them waits for a disk without saying so
_WINDOW = 32
_ENOUGH = 3  # durations, before they say anything
_FACTOR, _SLACK_S = 3.0, 1.4  # 0.6 of the 2 s are for the next look and for the stacks
_DISK_SLACK_S = 10.0  # of phases that wait for disks: save, load, eval, translate, sample, record
_IN_COLLECTIVE = ("distributed_c10d.py", "deepspeed/comm/")
_OWN_FRAMES = "pretrain/train/loop.py"


def hear(view: RankView, beat: Beat, now: float, times: PhaseTimes) -> tuple[RankView, PhaseTimes]:
    """A heartbeat has come: what the rank does now, and what the phases before have taken."""
    first = view.first_step if view.first_step is not None or beat.phase == "start" else beat.step
    told = beat.t if beat.t is not None else now
    gap = max(0.0, told - view.beat_t) if view.beat_t else 0.0
    step_s = view.step_s + (gap if view.phase == "step" else 0.0)
    phase_t = view.phase_t if beat.phase == view.phase and view.phase_t else told
    if beat.phase != view.phase and view.phase not in (*_STEP_PHASES, "start") and view.phase_t:
        times = learn(times, view.phase, told - view.phase_t)
    if beat.phase == "compile" != view.phase and view.trained:  # what was known of steps was of another shape
        times = PhaseTimes({**times.seconds, "step": ()})
    if beat.step > view.step:
        if view.trained and view.first_step is not None and beat.step == view.step + 1:
            times = learn(times, "step", step_s)
        step_s = 0.0
    own = (*view.own, beat.own_s)[-_WINDOW:] if beat.own_s is not None else view.own
    # Not `replace`, which takes twice the time: thousands of ranks beat several times a second.
    heard = RankView(
        view.spawned_t, now, view.host, beat.phase, beat.step, first, beat.collective, told, phase_t, step_s, own,
        view.exit, view.gone, view.node,
    )  # fmt: skip
    return heard, times


def learn(times: PhaseTimes, phase: str, seconds: float) -> PhaseTimes:
    known = (*times.seconds.get(phase, ()), seconds)[-_WINDOW:]
    return PhaseTimes({**times.seconds, phase: known})


def deadline_s(times: PhaseTimes, phase: str, limits: Limits) -> float:
    """How long a rank that trains may be silent in a phase."""
    if phase == "compile":
        return max(limits.heartbeat_timeout_s, limits.start_timeout_s)
    steps = times.seconds.get("step", ())
    known = steps if phase in _STEP_PHASES else times.seconds.get(phase, ())
    if not limits.learned_deadlines or min(len(steps), len(known)) < _ENOUGH:
        return limits.heartbeat_timeout_s
    slack_s = _SLACK_S if phase in _COMPUTING else _DISK_SLACK_S
    return min(_FACTOR * max(known) + slack_s, limits.heartbeat_timeout_s)


def find_hang(state: RunState, now: float, limits: Limits) -> Fault | None:
    """The rank that is silent for too long, or None."""
    living = [(rank, view) for rank, view in state.ranks.items() if not view.gone]
    least_s = min(_SLACK_S, limits.heartbeat_timeout_s)  # no bound is shorter
    quiet = [(rank, view) for rank, view in living if view.first_step is None or now - view.heard_t > least_s]
    if not quiet:
        return None
    collectives = [view.collective for _, view in living if view.trained]
    behind, all_train = min(collectives, default=0), len(collectives) == len(living)
    bounds: dict[str, float] = {}  # by phase: thousands of ranks are in the same one
    silent: list[tuple[float, int, RankView]] = []
    for rank, view in quiet:
        heard_t = state.heard_t(rank)
        if view.first_step is None:  # imports, model, restore: one bound for all of it
            over = now - view.spawned_t > limits.start_timeout_s
        elif not view.trained:  # the first step may compile
            over = now - heard_t > max(limits.heartbeat_timeout_s, limits.start_timeout_s)
        else:
            stack = state.stacks.get(rank)  # an agent tells of a process that is stopped, which no disk is to blame for
            phase = "step" if stack and stack.process_state == "T" else view.phase
            if phase not in bounds:
                bounds[phase] = deadline_s(state.times, phase, limits) if all_train else limits.heartbeat_timeout_s
            over = view.collective == behind and now - heard_t > bounds[phase]
        if over:
            silent.append((heard_t, rank, view))
    if not silent:
        return None
    heard_t, rank, view = min(silent, key=lambda entry: entry[:2])
    message = f"rank {rank} on {view.host or 'this host'} hung: silent for {now - heard_t:.1f} s {doing(view)}"
    return Fault(Cause.HANG, message, rank=rank, step=view.step if view.first_step is not None else None)


def doing(view: RankView) -> str:
    if view.first_step is None:
        return "while starting"
    return f"in phase {view.phase} at step {view.step}, collective {view.collective}"


def odd_one_out(ranks: Mapping[int, RankView], stacks: Mapping[int, RankStack], suspected: int) -> tuple[int, str]:
    """The rank that the others wait for, and how that is known; the suspected one when nothing tells more."""
    living = {rank: view for rank, view in ranks.items() if not view.gone}
    stopped = [rank for rank in sorted(living) if rank in stacks and stacks[rank].process_state == "T"]
    if stopped:
        return stopped[0], "its process is stopped"
    behind = min((view.collective for view in living.values()), default=0)
    late = [rank for rank, view in living.items() if view.collective == behind]
    if len(late) < len(living):
        return min(late), f"it has not come to collective {behind + 1}, where others wait"
    waiting = [rank for rank, stack in stacks.items() if in_collective(stack.text)]
    outside = [rank for rank, stack in stacks.items() if stack.text and rank not in waiting]
    if waiting and outside:
        return min(outside), "it is not in a collective, and the others are"
    silent = [rank for rank in living if rank not in stacks or not stacks[rank].text]
    if silent and len(silent) < len(living):
        return min(silent), "it does not answer, and the others do"
    return suspected, "nothing tells the ranks apart"


def in_collective(stack: str) -> bool:
    """Whether the thread of the loop is inside a collective, by its stack."""
    threads = stack.split("\n\n")
    loop = next((thread for thread in threads if _OWN_FRAMES in thread), threads[-1])
    return any(mark in loop for mark in _IN_COLLECTIVE)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Seconds of a rank's own work per step: waiting for data and the forward pass, without waits for others."""

    rank: int
    host: str
    median_s: float
    p90_s: float
    longest_s: float
    steps: int = field(default=0)


def quantiles(ranks: Mapping[int, RankView]) -> list[Quantiles]:
    """Of every rank that told its own times, the slowest first."""
    found = []
    for rank, view in ranks.items():
        if view.own:
            known = sorted(view.own)
            p90 = known[min(len(known) - 1, int(0.9 * len(known)))]
            found.append(Quantiles(rank, view.host, statistics.median(known), p90, known[-1], len(known)))
    return sorted(found, key=lambda one: (-one.median_s, one.rank))


def stragglers(ranks: Mapping[int, RankView], limits: Limits) -> list[tuple[Quantiles, float]]:
    """Ranks whose median is far above that of all, with that of all; only when every rank is known well."""
    known = quantiles(ranks)
    if len(known) < max(2, len(ranks)) or min(one.steps for one in known) < _WINDOW // 2:
        return []
    middle = statistics.median_low([one.median_s for one in known])
    bound = max(limits.straggler_factor * middle, middle + limits.straggler_least_s)
    return [(one, middle) for one in known if one.median_s > bound]


def report(state: RunState, now: float, fault: Fault, stacks: Mapping[int, RankStack]) -> str:
    """All ranks on one page: what each does, its step times, its stack."""
    lines = [f"attempt {state.attempt}: {fault.message}", ""]
    for rank, view in sorted(state.ranks.items()):
        stack = stacks.get(rank)
        word = {"T": "stopped", "D": "waits for a disk", "Z": "dead", "R": "runs", "S": "sleeps"}.get(
            stack.process_state if stack else "", "unknown"
        )
        gone = f"ended with {view.exit.code}" if view.exit else "lost" if view.gone else word
        lines.append(
            f"rank {rank} on {view.host or 'this host'}: {doing(view)}, silent for {now - view.heard_t:.1f} s, {gone}"
        )
    lines += ["", "own work per step (median, 90 %, longest of the last steps):"]
    lines += [
        f"rank {one.rank} on {one.host or 'this host'}: {one.median_s:.4f} {one.p90_s:.4f} {one.longest_s:.4f} s"
        for one in quantiles(state.ranks)
    ]
    for rank, stack in sorted(stacks.items()):
        lines += ["", f"--- stacks of rank {rank}", stack.text or "(no answer)"]
    return "\n".join(lines) + "\n"


def taken(stacks: Mapping[int, RankStack], more: Sequence[RankStack]) -> dict[int, RankStack]:
    return {**stacks, **{stack.rank: stack for stack in more}}
