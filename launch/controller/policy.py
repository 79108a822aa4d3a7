"""What the controller does about what it sees. PURE.

Takes → gives: (state, observation, now, limits) → (next state, actions). Invariants: exit code 6
(a peer failed) is never blamed, exit code 2 is never retried, budgets count since the last committed
progress, a new attempt starts only when no rank of the last one is known to live, and nothing is
restarted once somebody asked the run to end. Own design (DESIGN section 7); `Phase` draws the states,
`blame`, `budgets` and `moves` hold what is decided about faults and slots.
"""

from __future__ import annotations

from dataclasses import replace

from launch.controller.blame import ENDED_WELL, UNEXPLAINED, find_fault
from launch.controller.budgets import charge, over_budget, stopped
from launch.controller.hangs import doing, find_hang, hear, odd_one_out, report, stragglers, taken
from launch.controller.moves import consider, evaluator_ended, leaving_nodes, slots_without
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
    RankView,
    RecordEnd,
    RecordStraggler,
    RunState,
    StartRanks,
    Stop,
    TakeStacks,
)
from pretrain.errors import ExitCode

Decision = tuple[RunState, list[Action]]

# What all ranks cost together stays below a tenth of the controller's time, however many there are.
_JUDGE_RANK_S = 1e-4
_COMPARE_RANK_S = 2e-3
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
        return _finish(state, stopped(state))
    if state.phase is Phase.WAITING:
        if now < state.retry_t:
            return state, []
        state = replace(state, phase=Phase.PLACING, since_t=now, known_t=now, asked=False)
    return _place(state, seen, now, limits)


def _absorb(state: RunState, seen: Observation, now: float, limits: Limits) -> RunState:
    state = _absorb_ranks(state, seen, now, limits)
    if seen.held.nodes or seen.offers is not None or state.known_t is None:
        state = replace(state, known_t=now, leaving=leaving_nodes(seen))
    if seen.standbys is not None:
        state = replace(state, growth=replace(state.growth, ready=seen.standbys))
    if seen.evaluator_code is not None and state.evaluating:
        state = evaluator_ended(state, seen.evaluator_code, now)
    if seen.committed_step is not None and seen.committed_step > state.committed_step:
        # Progress that is safe: what went wrong before it is forgiven.
        state = replace(state, committed_step=seen.committed_step, failures={}, crash_step=None, crashes=0)
    began_t = now if state.began_t is None else state.began_t
    over = limits.time_limit_s is not None and now - began_t >= limits.time_limit_s
    stop = max(seen.stop, Stop.INTERRUPT if over else None, key=lambda wish: _STOP_STRENGTH[wish])
    state = replace(state, began_t=began_t, looked_t=now)
    if _STOP_STRENGTH[stop] > _STOP_STRENGTH[state.stop]:
        state = replace(state, stop=stop, stop_t=now)
    return state


def _absorb_ranks(state: RunState, seen: Observation, now: float, limits: Limits) -> RunState:
    # Who looks so late was asleep itself, and an agent that says nothing passes nothing on: that is no rank's silence.
    slept = state.looked_t is not None and now - state.looked_t > limits.sleepless_s
    if not (seen.beats or seen.exits or seen.lost or seen.unheard or seen.stacks or slept):
        return state
    ranks, times = dict(state.ranks), state.times
    for beat in seen.beats:
        view = ranks.get(beat.rank)
        if view is None or view.gone:
            continue
        ranks[beat.rank], times = hear(view, beat, now, times)
    excused = state.excused
    if slept or seen.unheard:
        excused = {**excused, **dict.fromkeys(ranks if slept else seen.unheard, now)}
    for ended in seen.exits:
        if ended.rank in ranks and not ranks[ended.rank].gone:
            ranks[ended.rank] = replace(ranks[ended.rank], exit=ended, exit_t=now, gone=True)
    for rank in seen.lost:
        if rank in ranks:
            ranks[rank] = replace(ranks[rank], gone=True)
    trained = state.trained or all(view.trained for view in ranks.values())
    exited = state.exited or bool(seen.exits)
    stacks = taken(state.stacks, seen.stacks)
    return replace(state, ranks=ranks, excused=excused, times=times, trained=trained, exited=exited, stacks=stacks)


def _place(state: RunState, seen: Observation, now: float, limits: Limits) -> Decision:
    if seen.placed is not None and state.asked:
        return _start(state, seen, now, limits)
    if seen.place_failed is not None:
        state = replace(state, asked=False)
    problem = _no_slots(state, seen, now, limits)
    if problem:
        return _finish(state, Outcome("interrupted", ExitCode.INTERRUPTED, reason=problem))
    if state.asked or (seen.offers is None and not seen.held.nodes):
        return state, []
    # Slots of a node are taken at once: a run on one host has no other chance to get spare ones.
    spares = limits.spare_ranks if limits.one_host else 0
    fits = min(limits.num_ranks + spares, slots_without(seen, state.quarantined))
    # Nodes of a cluster come up one by one; those that were lost come back when they can, and the run grows then.
    patient = state.started or now - state.since_t >= limits.placing_grace_s
    if fits >= limits.num_ranks or (fits >= limits.min_ranks and patient):
        return replace(state, asked=True), [Place(fits, state.quarantined)]
    return state, []


def _start(state: RunState, seen: Observation, now: float, limits: Limits) -> Decision:
    attempt = state.attempt + 1
    placed = (seen.placed or ())[: limits.num_ranks]  # what is left are spare slots
    ranks = {
        rank: RankView(spawned_t=now, heard_t=now, host=seat.host, node=seat.node) for rank, seat in enumerate(placed)
    }
    growth = replace(state.growth, standing=0, ready=0, full_t=None, look_t=now)
    started = replace(
        state,
        phase=Phase.RUNNING,
        since_t=now,
        attempt=attempt,
        started=True,
        trained=False,
        exited=False,
        judged_t=now,
        slow=frozenset(),
        stacks={},
        asked=False,
        growth=growth,
        ranks=ranks,
        excused={},
    )
    return started, [StartRanks(attempt, len(ranks), state.why)]


def _no_slots(state: RunState, seen: Observation, now: float, limits: Limits) -> str:
    """Why waiting for slots has no sense any more; empty while it has."""
    known_t = state.known_t if state.known_t is not None else now
    if now - known_t > limits.table_timeout_s:
        return (
            f"Ray has told nothing about its nodes for {limits.table_timeout_s:g} s and no agent is left. "
            "Its head or its control service is gone. Start the cluster again, then resume the run"
        )
    if now - state.since_t > limits.slots_timeout_s:
        found = slots_without(seen, frozenset())
        return (
            f"no slots for {limits.min_ranks} ranks within cluster.slots_timeout_s={limits.slots_timeout_s:g} s, "
            f"there are {found}. Add nodes or lower cluster.min_ranks, then resume the run"
        )
    return ""


def _watch_ranks(state: RunState, seen: Observation, now: float, limits: Limits, asked_before: Stop | None) -> Decision:
    if seen.fenced:
        return _kill(state, now, Outcome("fenced", ExitCode.FENCED, reason=seen.fenced), seen.fenced)
    if state.stop in (Stop.NOW, Stop.ABORT):
        return _kill(state, now, stopped(state), "asked to end at once")
    if seen.placed is not None or seen.place_failed is not None:  # slots to grow into, asked for while training
        state = replace(state, asked=False)
    fault = find_fault(state, seen, now, limits)
    if fault:
        return _fail(state, fault, seen, now, limits)
    if state.exited:
        codes = [view.exit.code for view in state.ranks.values() if view.exit]
        if len(codes) == len(state.ranks) and all(code in ENDED_WELL for code in codes):
            return _ended_well(state, codes, now, limits)
        if UNEXPLAINED & set(codes) and state.phase is Phase.RUNNING:
            state = replace(state, phase=Phase.SUSPECTING, since_t=now)
    if state.phase is Phase.EXAMINING:
        return _examine(state, seen, now, limits)
    state, hang = (state, None) if seen.is_part else _judge_hang(state, now, limits)
    if hang:
        return replace(state, phase=Phase.EXAMINING, since_t=now, suspected=hang, stacks={}), [TakeStacks()]
    return _serve(state, seen, now, limits, asked_before)


def _serve(state: RunState, seen: Observation, now: float, limits: Limits, asked_before: Stop | None) -> Decision:
    """Ranks in good health: requests, slots, words about slow ones."""
    if state.stop and now - state.stop_t > limits.stop_timeout_s:
        reason = f"the ranks did not save within {limits.stop_timeout_s:g} s"
        return _kill(state, now, replace(stopped(state), reason=reason), reason)
    if state.stop:
        asked: list[Action] = [AskRanks("stop" if state.stop is Stop.STOP else "drain")]
        return state, asked if state.stop is not asked_before else []
    if state.phase is not Phase.RUNNING:
        return state, []
    state, actions = consider(state, seen, now, limits)
    return (state, actions) if actions else _tell_stragglers(state, now, limits)


def _judge_hang(state: RunState, now: float, limits: Limits) -> tuple[RunState, Fault | None]:
    """Looks at the silence of all ranks, of thousands a few times a second only."""
    if now - state.judged_t < _JUDGE_RANK_S * len(state.ranks):
        return state, None
    return replace(state, judged_t=now), find_hang(state, now, limits)


def _examine(state: RunState, seen: Observation, now: float, limits: Limits) -> Decision:
    """The stacks of a hung attempt come in; then it is killed, and the odd rank out is blamed."""
    living = [rank for rank, view in state.ranks.items() if not view.gone]
    rank = state.suspected.rank if state.suspected else None
    if rank is not None and rank in state.ranks and state.heard_t(rank) > state.since_t:  # it was slow, and goes on
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
    fault = replace(suspected, rank=odd, message=f"{message}; {how}", host=view.host)
    return _fail(state, fault, seen, now, limits, report(state, now, fault, state.stacks))


def _tell_stragglers(state: RunState, now: float, limits: Limits) -> Decision:
    if now - state.compared_t < _COMPARE_RANK_S * len(state.ranks):
        return state, []
    state = replace(state, compared_t=now)
    slow = {one.rank: (one, middle) for one, middle in stragglers(state.ranks, limits)}
    new = [pair for rank, pair in slow.items() if rank not in state.slow]
    told: list[Action] = [
        RecordStraggler(state.attempt, one.rank, one.host, one.median_s, one.p90_s, middle) for one, middle in new
    ]
    return (replace(state, slow=frozenset(slow)) if slow.keys() != state.slow else state), told


def _fail(state: RunState, fault: Fault, seen: Observation, now: float, limits: Limits, page: str = "") -> Decision:
    state, outcome, records = charge(state, fault, seen, now, limits, page)
    state, actions = _kill(state, now, outcome, "")
    return state, [*actions, *records]  # writing may take time: the kill goes first


def _ended_well(state: RunState, codes: list[int], now: float, limits: Limits) -> Decision:
    """All ranks have saved and ended: for good, or to go on elsewhere."""
    if all(code == ExitCode.DONE for code in codes):
        return _finish(state, Outcome("completed", ExitCode.DONE), "completed")
    if state.stop or ExitCode.STOPPED in codes:
        outcome = Outcome("stopped", ExitCode.STOPPED) if ExitCode.STOPPED in codes else stopped(state)
        return _finish(state, outcome, outcome.event)
    waiting = replace(state, phase=Phase.WAITING, since_t=now, retry_t=now, ranks={}, asked=False, moving="")
    if state.moving:
        return replace(waiting, why=state.moving), [RecordEnd(state.attempt, "moved")]
    if limits.one_host:
        return _finish(state, Outcome("interrupted", ExitCode.INTERRUPTED), "interrupted")
    # Somebody ended the ranks of a node (a scheduler that takes it away): the rest of the cluster goes on.
    failures = {**state.failures, Cause.PREEMPTION: state.failures.get(Cause.PREEMPTION, 0) + 1}
    waiting = replace(waiting, failures=failures, why="ranks were asked to end from outside")
    spent = over_budget(waiting, Cause.PREEMPTION, limits)
    if spent:
        return _finish(waiting, Outcome("interrupted", ExitCode.INTERRUPTED, reason=spent), "interrupted")
    return waiting, [RecordEnd(state.attempt, "preempted")]


def _kill(state: RunState, now: float, outcome: Outcome | None, reason: str) -> Decision:
    killing = replace(state, phase=Phase.KILLING, since_t=now, outcome=outcome, asked=False, moving="", suspected=None)
    return killing, [KillRanks(reason)]


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
