"""What a fault costs: budgets, backoff, crash loops, hosts that are left out. PURE.

Takes a fault → the state after it, whether the run ends, what is written down. Invariants: exit code 2 is never
retried; budgets count since the last committed progress, evidence against a host since a day; no host is left
out when the others have too few slots. Own design (DESIGN section 7).
"""

from __future__ import annotations

from dataclasses import replace

from launch.controller.blame import HOPELESS
from launch.controller.moves import slots_without
from launch.controller.state import (
    Action,
    Cause,
    Fault,
    Growth,
    Limits,
    Observation,
    Outcome,
    Quarantine,
    RecordFault,
    RunState,
    Stop,
)
from pretrain.errors import ExitCode

_KEYS = {
    Cause.APPLICATION: "max_application_failures",
    Cause.NODE: "max_node_failures",
    Cause.HANG: "max_hangs",
    Cause.PREEMPTION: "max_preemptions",
}
_OF_THE_MACHINE = (Cause.NODE, Cause.PREEMPTION)
_LONGEST_GROWTH_WAIT_S = 3600.0


def charge(
    state: RunState, fault: Fault, seen: Observation, now: float, limits: Limits, page: str = ""
) -> tuple[RunState, Outcome | None, list[Action]]:
    """Charges a fault; gives why the run ends with it, or None, and what is to be recorded.

    Args:
        page: all ranks on one page, where a hang was examined.
    """
    state, quarantine = _quarantine(_count(state, fault, now, limits), fault, seen, now, limits)
    outcome = _give_up(state, fault, limits)
    wait_s = state.retry_t - now
    plan = "The run ends" if outcome else f"attempt {state.attempt + 1} starts in {wait_s:g} s"
    return state, outcome, [RecordFault(state.attempt, fault, plan, page), *([] if outcome else quarantine)]


def _count(state: RunState, fault: Fault, now: float, limits: Limits) -> RunState:
    failures = {**state.failures, fault.cause: state.failures.get(fault.cause, 0) + 1}
    crashes, crash_host = 0, ""
    if fault.cause not in _OF_THE_MACHINE:
        again = bool(state.crashes) and state.crash_step == fault.step
        crashes = state.crashes + 1 if again else 1
        crash_host = fault.host if not again or state.crash_host == fault.host else ""
    wait_s = min(limits.backoff_s * 2.0 ** min(sum(failures.values()) - 1, 60), limits.max_backoff_s)
    return replace(
        state,
        failures=failures,
        crash_step=fault.step,
        crash_host=crash_host,
        crashes=crashes,
        retry_t=now + wait_s,
        asked=False,
        moving="",
        growth=_slower(state.growth, fault, now, limits),
        why=fault.message,
    )


def _slower(growth: Growth, fault: Fault, now: float, limits: Limits) -> Growth:
    """A node that is lost soon after the run grew onto it makes the next growth wait."""
    if fault.cause not in _OF_THE_MACHINE or growth.grown_t is None:
        return growth
    flapped = now - growth.grown_t < limits.flap_s
    wait_s = min(max(2 * growth.wait_s, 60.0), _LONGEST_GROWTH_WAIT_S) if flapped else 0.0
    return replace(growth, wait_s=wait_s)


def _quarantine(
    state: RunState, fault: Fault, seen: Observation, now: float, limits: Limits
) -> tuple[RunState, list[Action]]:
    """Keeps the fault as evidence against its host, and leaves the host out when there is enough of it."""
    host = fault.host
    if not host or fault.cause is Cause.PREEMPTION or fault.exit_code in HOPELESS:
        return state, []
    recent = [entry for entry in state.evidence.get(host, ()) if now - entry[0] < limits.quarantine_window_s]
    recent.append((now, fault.message))
    state = replace(state, evidence={**state.evidence, host: tuple(recent)})
    # Twice in a row at one step on one host: the third try, which would end the run, belongs elsewhere.
    suspicious = len(recent) >= limits.quarantine_faults or (state.crashes >= 2 and state.crash_host == host)
    out = state.quarantined | {host}
    if not suspicious or slots_without(seen, out) < limits.min_ranks:
        return state, []
    return replace(state, quarantined=out), [Quarantine(host, tuple(message for _, message in recent))]


def _give_up(state: RunState, fault: Fault, limits: Limits) -> Outcome | None:
    """Why the run ends with this fault, or None: try again."""
    if fault.exit_code == ExitCode.USER_ERROR:
        return Outcome("failed", ExitCode.USER_ERROR, reason=f"not tried again, the input is wrong: {fault.text}")
    if fault.exit_code == ExitCode.UNHEALTHY:
        return Outcome("failed", ExitCode.FAILED, reason=f"not tried again, it would end the same way: {fault.text}")
    if state.stop:
        return replace(stopped(state), reason=f"a fault while ending: {fault.text}")
    if state.crashes >= limits.crash_loop:
        where = f"at step {fault.step}" if fault.step is not None else "before the first step"
        reason = f"crash loop: {state.crashes} attempts in a row ended {where}. The last: {fault.text}"
        return Outcome("failed", ExitCode.FAILED, reason=reason)
    spent = over_budget(state, fault.cause, limits)
    return Outcome("failed", ExitCode.FAILED, reason=f"{spent}. The last: {fault.text}") if spent else None


def over_budget(state: RunState, cause: Cause, limits: Limits) -> str:
    """Which budget is spent, in words; empty while it is not."""
    budget = limits.max_failures[cause]
    if state.failures.get(cause, 0) <= budget:
        return ""
    return (
        f"{state.failures[cause]} {cause} failures since the last committed checkpoint exceed "
        f"cluster.{_KEYS[cause]}={budget}"
    )


def stopped(state: RunState) -> Outcome:
    """How a run ends that was asked to."""
    if state.stop in (Stop.INTERRUPT, Stop.ABORT):
        return Outcome("interrupted", ExitCode.INTERRUPTED)
    return Outcome("stopped", ExitCode.STOPPED)
