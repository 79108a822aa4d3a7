"""Where a run could be: how many slots there are, when to hold more, when to move. PURE.

Takes the slots that are held and those that are offered → orders for more slots while the ranks train, standbys
on them, and, when they are warm, the request to save and end, after which the next attempt is larger or
elsewhere. Invariants: a move begins with a commit made for it, so no step is done twice; a host that leaves or
was quarantined is never counted. Own design (DESIGN section 7).
"""

from __future__ import annotations

from dataclasses import replace

from launch.controller.state import Action, AskRanks, Evaluate, Limits, Observation, Place, RunState, StandBy

LOOK_AGAIN_S = 10.0  # between two orders for more slots while the ranks train
EVALUATE_AGAIN_S = 10.0  # after a process that measured checkpoints ended; six times as long after it failed
EVALUATOR_FAILURES = 3  # in a row, after which there is none any more

Decision = tuple[RunState, list[Action]]


def slots_without(seen: Observation, without: frozenset[str]) -> int:
    """All slots, held and offered, on nodes that stay and on hosts other than `without`."""
    return seen.held.without(without) + (seen.offers.without(without) if seen.offers else 0)


def leaving_nodes(seen: Observation) -> frozenset[str]:
    """Nodes that have said that they go."""
    return seen.held.leaving | (seen.offers.leaving if seen.offers else frozenset())


def consider(state: RunState, seen: Observation, now: float, limits: Limits) -> Decision:
    """What a run in good health does about slots."""
    if state.moving:
        return state, []
    reason = _why_leave(state, seen, limits)
    if reason:
        return _move(state, reason)
    if not state.trained:  # nothing takes CPU or disk from an attempt that starts
        return state, []
    held = seen.held.without(state.quarantined)
    if limits.standbys and held > state.growth.standing:
        return replace(state, growth=replace(state.growth, standing=held)), [StandBy()]
    if _may_evaluate(state, held, now, limits):
        return replace(state, evaluating=True), [Evaluate()]
    more = _more_slots(state, seen, held, now, limits)
    if more:
        growth = replace(state.growth, look_t=now + LOOK_AGAIN_S)
        return replace(state, asked=True, growth=growth), [Place(more, state.quarantined, keep=True)]
    return _grow(state, held, now, limits)


def evaluator_ended(state: RunState, code: int, now: float) -> RunState:
    """Its slot was needed, its node is gone, or it failed: there is another one later."""
    failures = state.evaluator_failures + 1 if code else 0
    rest_s = 6 * EVALUATE_AGAIN_S if code else EVALUATE_AGAIN_S
    return replace(state, evaluating=False, evaluate_t=now + rest_s, evaluator_failures=failures)


def _may_evaluate(state: RunState, held: int, now: float, limits: Limits) -> bool:
    """Whether checkpoints are to be measured now: a slot is held that no rank of this attempt has."""
    wanted = limits.evaluates and not state.evaluating and state.evaluator_failures < EVALUATOR_FAILURES
    return wanted and now >= state.evaluate_t and held > len(state.ranks)


def _why_leave(state: RunState, seen: Observation, limits: Limits) -> str:
    """A node with ranks of ours goes, and there is a replacement or no more time; empty: stay."""
    if not state.leaving:
        return ""
    here = {view.node for view in state.ranks.values()}
    leaving = [(o.leaving_s, o.host) for node, o in seen.held.nodes.items() if o.leaving_s is not None and node in here]
    if not leaving:
        return ""
    left_s, host = min(leaving)
    replaced = slots_without(seen, state.quarantined) >= len(state.ranks)
    if not replaced and left_s > limits.drain_margin_s:
        return ""
    return f"node {host} leaves in {left_s:.0f} s"


def _more_slots(state: RunState, seen: Observation, held: int, now: float, limits: Limits) -> int:
    """How many slots to hold in all, 0 to leave it."""
    wanted = limits.num_ranks + limits.spare_ranks
    if held >= wanted or state.asked or now < state.growth.look_t:
        return 0
    offered = seen.offers.without(state.quarantined) if seen.offers else 0
    return min(wanted, held + offered) if offered else 0


def _grow(state: RunState, held: int, now: float, limits: Limits) -> Decision:
    target, growth = min(limits.num_ranks, held), state.growth
    if target <= len(state.ranks):
        return state, []
    if growth.full_t is None:
        growth = replace(growth, full_t=now)
    assert growth.full_t is not None
    warm = not limits.standbys or growth.ready >= target or now - growth.full_t >= limits.standbys_within_s
    early = growth.grown_t is not None and now - growth.grown_t < growth.wait_s
    if not warm or early or state.asked:
        return replace(state, growth=growth), []
    growth = replace(growth, grown_t=now)
    return _move(replace(state, growth=growth), f"there are slots for {target} ranks, {len(state.ranks)} ran")


def _move(state: RunState, reason: str) -> Decision:
    return replace(state, moving=reason), [AskRanks("drain")]
