"""Who is to blame for the end of an attempt, and what an exit code says. PURE.

Takes the ranks as they are known and the last observation → one `Fault` or None. Invariants: exit code 6 (a
peer failed) is never blamed on the rank that reports it; a rank that knows why it ends explains more than
one that was killed. Own design (DESIGN section 7).
"""

from __future__ import annotations

import signal
from dataclasses import replace

from launch.controller.state import Cause, Fault, Limits, Observation, Phase, RankExit, RunState
from pretrain.errors import ExitCode

HOPELESS = (ExitCode.USER_ERROR, ExitCode.UNHEALTHY)  # another attempt would end the same way
UNEXPLAINED = frozenset({int(ExitCode.PEER_FAILED), -signal.SIGKILL})  # the reason may show a moment later
ENDED_WELL = (ExitCode.DONE, ExitCode.STOPPED, ExitCode.INTERRUPTED)


def find_fault(state: RunState, seen: Observation, now: float, limits: Limits) -> Fault | None:
    """The one to blame: ranks that ended badly first, then lost nodes, then unexplained victims."""
    if not (state.exited or seen.lost or seen.start_failed or state.phase is Phase.SUSPECTING):
        return None
    exits = [view.exit for view in state.ranks.values() if view.exit]
    bad = [ended for ended in exits if ended.code not in (*ENDED_WELL, ExitCode.PEER_FAILED, ExitCode.FENCED)]
    if bad and not _may_be_the_node(state, bad, seen, now, limits):
        # A rank that knows why it ends explains more than one that was killed.
        return _exit_fault(state, min(bad, key=lambda ended: (ended.code not in HOPELESS, ended.rank)))
    if seen.start_failed:
        return Fault(Cause.NODE, seen.start_failed)
    if seen.lost:
        rank, what = min(seen.lost.items())
        view = state.ranks.get(rank)
        cause = Cause.PREEMPTION if view and view.node in state.leaving else Cause.NODE
        return Fault(cause, what, rank=rank, step=view.step if view else None, host=view.host if view else "")
    for ended in exits:
        if ended.code == ExitCode.FENCED:
            return replace(_exit_fault(state, ended), cause=Cause.NODE)
    victim = next((ended for ended in exits if ended.code == ExitCode.PEER_FAILED), None)
    if victim and not bad and state.phase is Phase.SUSPECTING and now - state.since_t >= limits.suspect_grace_s:
        message = f"a collective broke in rank {victim.rank} and no rank was found that ended by its own fault"
        return Fault(Cause.APPLICATION, message, victim.tail, exit_code=victim.code, step=state.step)
    return None


def _may_be_the_node(state: RunState, bad: list[RankExit], seen: Observation, now: float, limits: Limits) -> bool:
    """Whether all that ended badly was killed from outside, and its agent is gone or has not yet outlived it.

    What takes a node away kills its processes one by one: Ray, for one, an agent's children before the agent.
    """
    if any(ended.code != -signal.SIGKILL for ended in bad):
        return False
    last_t = max(state.ranks[ended.rank].exit_t for ended in bad)
    return any(ended.rank in seen.lost for ended in bad) or now - last_t < limits.killed_grace_s


def _exit_fault(state: RunState, ended: RankExit) -> Fault:
    view = state.ranks[ended.rank]
    where = f" at step {view.step}" if view.first_step is not None else " before its first step"
    message = f"rank {ended.rank} on {view.host or 'this host'} {describe_exit(ended.code)}{where}"
    taken = ended.code < 0 and view.node in state.leaving  # a node that leaves ends what runs on it
    return Fault(
        Cause.PREEMPTION if taken else Cause.APPLICATION,
        message,
        ended.tail,
        rank=ended.rank,
        exit_code=ended.code,
        step=view.step if view.first_step is not None else None,
        host=view.host,
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
