"""What the controller does about what it sees. PURE.

Takes → gives: (state, observation, now, limits) → (next state, actions). Invariants: exit code 6
(a peer failed) is never blamed, exit code 2 is never retried, budgets count since the last committed
progress, a new attempt starts only when no rank of the last one is known to live, and nothing is
restarted once somebody asked the run to end. Own design (DESIGN section 7).
"""

from __future__ import annotations

import signal
from dataclasses import replace

from launch.controller.hangs import doing, find_hang, hear, odd_one_out, report, stragglers, taken
from launch.controller.state import (
    Action,
    AskRanks,
    Cause,
    Fault,
    Finish,
    KillRanks,
    Limits,
    Observation,
    Outcome,
    Phase,
    Place,
    RankExit,
    RankView,
    RecordEnd,
    RecordFault,
    RecordStraggler,
    RunState,
    StandBy,
    StartRanks,
    Stop,
    TakeStacks,
)
from pretrain.errors import ExitCode

Decision = tuple[RunState, list[Action]]

# Another attempt would end the same way.
_HOPELESS = (ExitCode.USER_ERROR, ExitCode.UNHEALTHY)
_ENDED_WELL = (ExitCode.DONE, ExitCode.STOPPED, ExitCode.INTERRUPTED)
_STOP_STRENGTH: dict[Stop | None, int] = {stop: strength for strength, stop in enumerate((None, *Stop))}


def decide(state: RunState, seen: Observation, now: float, limits: Limits) -> Decision:
    """One look: absorbs what was seen, then acts by phase."""
    asked_before = state.stop
    state = _absorb(state, seen, now, limits)
    if state.phase in (Phase.RUNNING, Phase.SUSPECTING, Phase.EXAMINING):
        return _watch_ranks(state, seen, now, limits, asked_before)
    if state.phase is Phase.KILLING:
        return _await_killed(state, now, limits)
    if state.phase is Phase.ENDED:
        return state, []
    if seen.fenced:
        return _finish(state, Outcome("fenced", ExitCode.FENCED, reason=seen.fenced))
    if state.stop:
        return _finish(state, _stopped(state))
    if state.phase is Phase.WAITING:
        if now < state.retry_t:
            return state, []
        state = replace(state, phase=Phase.PLACING, since_t=now, asked=False)
    return _place(state, seen, now, limits)


def _absorb(state: RunState, seen: Observation, now: float, limits: Limits) -> RunState:
    ranks, times = dict(state.ranks), state.times
    for beat in seen.beats:
        view = ranks.get(beat.rank)
        if view is None or view.gone:
            continue
        ranks[beat.rank], times = hear(view, beat, now, times)
    # Who looks so late was asleep itself, and an agent that says nothing passes nothing on: that is no rank's silence.
    slept = state.looked_t is not None and now - state.looked_t > limits.sleepless_s
    for rank in ranks if slept else seen.unheard & ranks.keys():
        ranks[rank] = replace(ranks[rank], heard_t=now)
    for ended in seen.exits:
        if ended.rank in ranks and not ranks[ended.rank].gone:
            ranks[ended.rank] = replace(ranks[ended.rank], exit=ended, gone=True)
    for rank in seen.lost:
        if rank in ranks:
            ranks[rank] = replace(ranks[rank], gone=True)
    state = replace(state, ranks=ranks, times=times, looked_t=now, stacks=taken(state.stacks, seen.stacks))
    if seen.committed_step is not None and seen.committed_step > state.committed_step:
        # Progress that is safe: what went wrong before it is forgiven.
        state = replace(state, committed_step=seen.committed_step, failures={}, crash_step=None, crashes=0)
    began_t = now if state.began_t is None else state.began_t
    over = limits.time_limit_s is not None and now - began_t >= limits.time_limit_s
    stop = max(seen.stop, Stop.INTERRUPT if over else None, key=lambda wish: _STOP_STRENGTH[wish])
    state = replace(state, began_t=began_t)
    if _STOP_STRENGTH[stop] > _STOP_STRENGTH[state.stop]:
        state = replace(state, stop=stop, stop_t=now)
    return state


def _place(state: RunState, seen: Observation, now: float, limits: Limits) -> Decision:
    if seen.placed is not None:
        attempt = state.attempt + 1
        ranks = {rank: RankView(spawned_t=now, heard_t=now, host=host) for rank, host in enumerate(seen.placed)}
        started = replace(
            state,
            phase=Phase.RUNNING,
            since_t=now,
            attempt=attempt,
            asked=False,
            standing_by=False,
            ranks=ranks,
            slow=frozenset(),
        )
        return started, [StartRanks(attempt, len(ranks), state.why)]
    if seen.place_failed is not None:
        state = replace(state, asked=False)
    if state.asked or seen.free_ranks is None:
        return state, []
    fits = min(limits.num_ranks, seen.free_ranks)
    patient = now - state.since_t >= limits.placing_grace_s
    if fits == limits.num_ranks or (fits >= limits.min_ranks and patient):
        return replace(state, asked=True), [Place(fits)]
    return state, []


def _watch_ranks(state: RunState, seen: Observation, now: float, limits: Limits, asked_before: Stop | None) -> Decision:
    if seen.fenced:
        return _kill(state, now, Outcome("fenced", ExitCode.FENCED, reason=seen.fenced), seen.fenced)
    if state.stop in (Stop.NOW, Stop.ABORT):
        return _kill(state, now, _stopped(state), "asked to end at once")
    fault = _find_fault(state, seen, now, limits)
    if fault:
        return _fail(state, fault, now, limits)
    views = state.ranks.values()
    codes = [view.exit.code for view in views if view.exit]
    if len(codes) == len(views) and all(code in _ENDED_WELL for code in codes):
        return _finish(state, _ended_well(state, codes), _attempt_word(codes))
    if state.phase is Phase.EXAMINING:
        return _examine(state, now, limits)
    hang = find_hang(state, now, limits)
    if hang:
        return replace(state, phase=Phase.EXAMINING, since_t=now, suspected=hang, stacks={}), [TakeStacks()]
    if state.stop and now - state.stop_t > limits.stop_timeout_s:
        reason = f"the ranks did not save within {limits.stop_timeout_s:g} s"
        return _kill(state, now, replace(_stopped(state), reason=reason), reason)
    if ExitCode.PEER_FAILED in codes and state.phase is Phase.RUNNING:
        state = replace(state, phase=Phase.SUSPECTING, since_t=now)
    if state.stop and state.stop is not asked_before:
        return state, [AskRanks("stop" if state.stop is Stop.STOP else "drain")]
    if limits.standbys and _may_stand_by(state):
        return replace(state, standing_by=True), [StandBy()]
    return _tell_stragglers(state, limits)


def _examine(state: RunState, now: float, limits: Limits) -> Decision:
    """The stacks of a hung attempt come in; then it is killed, and the odd rank out is blamed."""
    living = [rank for rank, view in state.ranks.items() if not view.gone]
    heard = state.suspected and state.ranks.get(state.suspected.rank if state.suspected.rank is not None else -1)
    if heard and heard.heard_t > state.since_t:  # it was slow, and goes on
        return replace(state, phase=Phase.RUNNING, since_t=now, suspected=None), []
    if any(rank not in state.stacks for rank in living) and now - state.since_t < limits.examine_s:
        return state, []
    assert state.suspected is not None
    suspected = state.suspected
    odd, how = odd_one_out(state.ranks, state.stacks, suspected.rank if suspected.rank is not None else living[0])
    view = state.ranks[odd]
    message = suspected.message
    if odd != suspected.rank:
        message = f"rank {odd} on {view.host or 'this host'} hung {doing(view)}; {message.partition(' hung: ')[2]}"
    fault = replace(suspected, rank=odd, message=f"{message}; {how}", step=suspected.step)
    return _fail(state, fault, now, limits, report(state, now, fault, state.stacks))


def _tell_stragglers(state: RunState, limits: Limits) -> Decision:
    slow = {one.rank: (one, middle) for one, middle in stragglers(state.ranks, limits)}
    new = [pair for rank, pair in slow.items() if rank not in state.slow]
    told: list[Action] = [
        RecordStraggler(state.attempt, one.rank, one.host, one.median_s, one.p90_s, middle) for one, middle in new
    ]
    return (replace(state, slow=frozenset(slow)) if slow.keys() != state.slow else state), told


def _may_stand_by(state: RunState) -> bool:
    """Standbys take CPU and disk while they import, so never while an attempt starts, ends or is in doubt."""
    training = all(view.trained and not view.gone for view in state.ranks.values())
    return training and state.phase is Phase.RUNNING and not state.stop and not state.standing_by


def _find_fault(state: RunState, seen: Observation, now: float, limits: Limits) -> Fault | None:
    """The one to blame: ranks that ended badly first, then lost nodes, then unexplained victims, then hangs."""
    blamed = [
        view.exit
        for view in state.ranks.values()
        if view.exit and view.exit.code not in (*_ENDED_WELL, ExitCode.PEER_FAILED, ExitCode.FENCED)
    ]
    if blamed:
        # A rank that knows why it ends explains more than one that was killed.
        return _exit_fault(state, min(blamed, key=lambda ended: (ended.code not in _HOPELESS, ended.rank)))
    if seen.start_failed:
        return Fault(Cause.NODE, seen.start_failed)
    if seen.lost:
        rank, what = min(seen.lost.items())
        return Fault(Cause.NODE, what, rank=rank, step=state.ranks[rank].step if rank in state.ranks else None)
    for view in state.ranks.values():
        if view.exit and view.exit.code == ExitCode.FENCED:
            return replace(_exit_fault(state, view.exit), cause=Cause.NODE)
    if state.phase is Phase.SUSPECTING and now - state.since_t >= limits.suspect_grace_s:
        victim = next(v.exit for v in state.ranks.values() if v.exit and v.exit.code == ExitCode.PEER_FAILED)
        message = f"a collective broke in rank {victim.rank} and no rank was found that ended by its own fault"
        return Fault(Cause.APPLICATION, message, victim.tail, exit_code=victim.code, step=state.step)
    return None


def _exit_fault(state: RunState, ended: RankExit) -> Fault:
    view = state.ranks[ended.rank]
    where = f" at step {view.step}" if view.first_step is not None else " before its first step"
    message = f"rank {ended.rank} on {view.host or 'this host'} {describe_exit(ended.code)}{where}"
    return Fault(
        Cause.APPLICATION,
        message,
        ended.tail,
        rank=ended.rank,
        exit_code=ended.code,
        step=view.step if view.first_step is not None else None,
    )


def describe_exit(code: int) -> str:
    """What an exit code of a rank that nobody here killed says about its end."""
    if code == -signal.SIGKILL:
        return "was ended by signal 9, likely out of memory (the kernel or an administrator killed it)"
    if code < 0:
        try:
            return f"was ended by signal {-code} ({signal.Signals(-code).name})"
        except ValueError:
            return f"was ended by signal {-code}"
    return f"ended with exit code {code}"


def _fail(state: RunState, fault: Fault, now: float, limits: Limits, page: str = "") -> Decision:
    failures = {**state.failures, fault.cause: state.failures.get(fault.cause, 0) + 1}
    crashes = 0
    if fault.cause is not Cause.NODE:
        crashes = state.crashes + 1 if state.crashes and state.crash_step == fault.step else 1
    wait_s = min(limits.backoff_s * 2 ** (sum(failures.values()) - 1), limits.max_backoff_s)
    state = replace(
        state,
        suspected=None,
        failures=failures,
        crash_step=fault.step,
        crashes=crashes,
        retry_t=now + wait_s,
        why=fault.message,
    )
    outcome = _give_up(state, fault, limits)
    plan = "The run ends" if outcome else f"attempt {state.attempt + 1} starts in {wait_s:g} s"
    state, actions = _kill(state, now, outcome, "")
    return state, [
        *actions,
        RecordFault(state.attempt, fault, plan, page),
    ]  # writing may take time: the kill goes first


def _give_up(state: RunState, fault: Fault, limits: Limits) -> Outcome | None:
    """Why the run ends with this fault, or None: try again."""
    if fault.exit_code == ExitCode.USER_ERROR:
        return Outcome("failed", ExitCode.USER_ERROR, reason=f"not tried again, the input is wrong: {fault.text}")
    if fault.exit_code == ExitCode.UNHEALTHY:
        return Outcome("failed", ExitCode.FAILED, reason=f"not tried again, it would end the same way: {fault.text}")
    if state.stop:
        return replace(_stopped(state), reason=f"a fault while ending: {fault.text}")
    if state.crashes >= limits.crash_loop:
        where = f"at step {fault.step}" if fault.step is not None else "before the first step"
        reason = f"crash loop: {state.crashes} attempts in a row ended {where}. The last: {fault.text}"
        return Outcome("failed", ExitCode.FAILED, reason=reason)
    budget = limits.max_failures[fault.cause]
    if state.failures[fault.cause] > budget:
        key = {
            Cause.APPLICATION: "max_application_failures",
            Cause.NODE: "max_node_failures",
            Cause.HANG: "max_hangs",
        }[fault.cause]
        reason = (
            f"{state.failures[fault.cause]} {fault.cause} failures since the last committed checkpoint exceed "
            f"cluster.{key}={budget}. The last: {fault.text}"
        )
        return Outcome("failed", ExitCode.FAILED, reason=reason)
    return None


def _kill(state: RunState, now: float, outcome: Outcome | None, reason: str) -> Decision:
    return replace(state, phase=Phase.KILLING, since_t=now, outcome=outcome), [KillRanks(reason)]


def _await_killed(state: RunState, now: float, limits: Limits) -> Decision:
    if not all(view.gone for view in state.ranks.values()) and now - state.since_t < limits.kill_grace_s:
        return state, []
    if state.outcome:
        return _finish(state, state.outcome, state.outcome.event)
    waiting = replace(state, phase=Phase.WAITING, since_t=now, ranks={})
    return waiting, [RecordEnd(state.attempt, "failed")]


def _finish(state: RunState, outcome: Outcome, attempt_word: str | None = None) -> Decision:
    if outcome.step is None and state.committed_step >= 0:
        outcome = replace(outcome, step=state.committed_step)
    ended = replace(state, phase=Phase.ENDED, outcome=outcome, ranks={})
    ends: list[Action] = [RecordEnd(state.attempt, attempt_word)] if attempt_word else []
    return ended, [*ends, Finish(outcome)]


def _stopped(state: RunState) -> Outcome:
    if state.stop in (Stop.INTERRUPT, Stop.ABORT):
        return Outcome("interrupted", ExitCode.INTERRUPTED)
    return Outcome("stopped", ExitCode.STOPPED)


def _ended_well(state: RunState, codes: list[int]) -> Outcome:
    if ExitCode.STOPPED in codes:
        return Outcome("stopped", ExitCode.STOPPED)
    if ExitCode.INTERRUPTED in codes:
        return Outcome("interrupted", ExitCode.INTERRUPTED)
    return Outcome("completed", ExitCode.DONE)


def _attempt_word(codes: list[int]) -> str:
    if ExitCode.STOPPED in codes:
        return "stopped"
    return "interrupted" if ExitCode.INTERRUPTED in codes else "completed"
