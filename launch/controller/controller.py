"""The controller of a run: observe → decide → act, every 0.1 s, until the run is over.

Takes a run directory, its lease and a crew → the outcome. All judgement is in `policy`; here are the
journal, the lease, the control requests and the crew. Invariants: whatever happens to the store, ranks
are killed first and words are written after; nothing is written once the lease is lost.
Own design (DESIGN section 7).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from launch.controller.news import News
from launch.controller.offers import Slots
from launch.controller.policy import decide
from launch.controller.state import (
    Action,
    AskRanks,
    Cause,
    Evaluate,
    Fault,
    Finish,
    KillRanks,
    Limits,
    Observation,
    Outcome,
    Phase,
    Place,
    Quarantine,
    RecordEnd,
    RecordFault,
    RecordStraggler,
    RunState,
    StandBy,
    StartRanks,
    Stop,
    TakeStacks,
)
from pretrain.config.schema import RunConfig
from pretrain.errors import ExitCode, FencedError, StoreError
from pretrain.faults import passing
from pretrain.log import Log
from pretrain.rundir import Event, EventKind, Lease, RunDirectory

LOOK_S = 0.1
REQUESTS_EVERY_S = 0.5
LEASE_EVERY_S = 1.0
# Without knowledge of slots and without an agent. A cluster's control service may be started again; a local one is not.
TABLE_TIMEOUT_S, LOCAL_TABLE_TIMEOUT_S = 300.0, 10.0
JOURNAL_WITHIN_S = 30.0  # longest wait at the end for a store that takes no journal events

# Events of a rank's heartbeat pipe that belong into the journal.
RANK_EVENTS = {
    kind.value: kind
    for kind in (
        EventKind.RESTORED,
        EventKind.STARTED_FROM,
        EventKind.TRAINING,
        EventKind.COMMITTED,
        EventKind.SAVE_FAILED,
        EventKind.STEP_RERUN,
        EventKind.ROLLED_BACK,
    )
}


class Workers(Protocol):
    """What the controller needs of a crew; tests give it a fake one."""

    def held(self) -> Slots: ...
    def offers(self) -> Slots | None: ...
    def place(self, num_ranks: int, without: frozenset[str], *, keep: bool) -> None: ...
    def start(self, attempt: int, num_ranks: int) -> None: ...
    def stand_by(self) -> None: ...
    def evaluate(self) -> None: ...
    def take_stacks(self) -> None: ...
    def say(self, word: str) -> None: ...
    def kill(self) -> None: ...
    def look(self, timeout_s: float) -> News: ...


def limits_of(config: RunConfig, *, one_host: bool) -> Limits:
    """What the policy may spend for this run. On one host no culprit hides behind a silent node."""
    cluster, health = config.cluster, config.health
    return Limits(
        num_ranks=cluster.num_ranks,
        min_ranks=cluster.min_ranks or cluster.num_ranks,
        max_failures={
            Cause.APPLICATION: cluster.max_application_failures,
            Cause.NODE: cluster.max_node_failures,
            Cause.HANG: cluster.max_hangs,
            Cause.PREEMPTION: cluster.max_preemptions,
        },
        backoff_s=cluster.backoff_s,
        heartbeat_timeout_s=health.heartbeat_timeout_s,
        start_timeout_s=health.start_timeout_s,
        learned_deadlines=health.learned_deadlines,
        sleepless_s=1.0,
        suspect_grace_s=1.0 if one_host else 4.0,
        killed_grace_s=0.0 if one_host else 0.3,
        standbys=cluster.standbys,
        evaluates=config.eval.checkpoints is not None,
        stop_timeout_s=cluster.stop_grace_s,
        time_limit_s=cluster.time_limit_s,
        spare_ranks=cluster.spare_ranks,
        one_host=one_host,
        quarantine_faults=cluster.quarantine_faults,
        table_timeout_s=LOCAL_TABLE_TIMEOUT_S if one_host else TABLE_TIMEOUT_S,
        slots_timeout_s=cluster.slots_timeout_s,
    )


class Controller:
    """See the module.

    Args:
        host: name of the host that the controller runs on, for the journal.
        log: where people read what happens.
        finish_s: longest wait of a completed run for the measures of its last checkpoint.
        on_look: called after every look, at least every 0.1 s; shows progress.

    Requests that are pending when it begins are its own to carry out; whoever starts a run on a person's
    behalf clears older ones first.
    """

    def __init__(
        self,
        run: RunDirectory,
        lease: Lease,
        workers: Workers,
        limits: Limits,
        *,
        host: str,
        log: Log,
        finish_s: float = 0.0,
        on_look: Callable[[RunState], None] = lambda state: None,
    ) -> None:
        self._finish_s = finish_s
        self._run, self._lease, self._workers, self._limits = run, lease, workers, limits
        self._host, self._log, self._on_look = host, log, on_look
        self._journal = run.journal(lease)
        self._unwritten: list[tuple[EventKind, dict[str, Any]]] = []
        self._write_t = 0.0
        events = run.events()
        committed = [event.fields["step"] for event in events if event.kind == EventKind.COMMITTED]
        attempt = run.next_attempt()
        self._state = RunState(
            since_t=time.monotonic(),
            attempt=attempt - 1,
            committed_step=max(committed, default=-1),
            quarantined=_still_quarantined(events, time.time() - limits.quarantine_window_s),
            why="first start" if attempt == 1 else "the run goes on under a new controller",
        )
        self._stop: Stop | None = None
        self._fenced: str | None = None
        self._start_failed: str | None = None
        self._requests_t = self._lease_t = 0.0
        self._processes: dict[int, dict[str, Any]] = {}
        self._told: set[tuple[int, str, Any]] = set()

    def ask(self, stop: Stop) -> None:
        """Asks the run to end; from any thread or signal handler."""
        self._stop = stop

    def record(self, kind: EventKind, **fields: Any) -> None:
        """Writes a journal event, now or when the store takes it again."""
        self._unwritten.append((kind, fields))
        self._write()

    def run(self) -> Outcome:
        """Controls the run to its end. The crew and the lease stay the caller's to close."""
        while self._state.phase is not Phase.ENDED:
            self.look()
        outcome = self._state.outcome
        assert outcome is not None
        if self._state.evaluating and outcome.event == "completed":
            self._await_evaluator()
        return outcome

    def _await_evaluator(self) -> None:
        """The last checkpoint is being measured; whoever asks the run to end is served at once."""
        self._log.info("the last checkpoint is being measured", longest_s=self._finish_s)
        deadline = time.monotonic() + self._finish_s
        self._stop = None
        while time.monotonic() < deadline and not self._stop and not self._fenced:
            now = time.monotonic()
            if self._workers.look(LOOK_S).evaluator_code is not None:
                return
            self._check_lease(now)
            self._check_requests(now)
        self._log.warning("the last checkpoint was not measured; pretrain evaluate RUN --follow does it later")

    def look(self) -> None:
        """One turn: observe, decide, act."""
        passing("controller.look")
        news = self._workers.look(LOOK_S)
        now = time.monotonic()
        if self._unwritten and now - self._write_t > 1.0:
            self._write()
        committed = self._take_events(news)
        self._check_lease(now)
        self._check_requests(now)
        start_failed, self._start_failed = news.start_failed or self._start_failed, None
        seen = Observation(
            held=self._workers.held(),
            offers=self._workers.offers(),
            placed=news.placed,
            place_failed=news.place_failed,
            start_failed=start_failed,
            exits=tuple(news.exits),
            beats=tuple(news.beats),
            lost=news.lost,
            unheard=news.unheard,
            is_part=news.is_part,
            stacks=tuple(news.stacks),
            standbys=news.standbys,
            evaluator_code=news.evaluator_code,
            committed_step=committed,
            stop=self._stop,
            fenced=self._fenced,
        )
        self._state, actions = decide(self._state, seen, now, self._limits)
        for action in actions:
            self._act(action)
        self._on_look(self._state)

    def _act(self, action: Action) -> None:
        match action:
            case Place(num_ranks, without, keep):
                self._workers.place(num_ranks, without, keep=keep)
            case StartRanks(attempt, num_ranks, why):
                self._start(attempt, num_ranks, why)
            case StandBy():
                self._workers.stand_by()
            case Evaluate():
                self._workers.evaluate()
            case TakeStacks():
                self._workers.take_stacks()
            case RecordStraggler(attempt, rank, host):
                told = {"median_s": action.median_s, "p90_s": action.p90_s, "others_median_s": action.others_median_s}
                self._log.warning("a rank is slower than the others", rank=rank, host=host, **told)
                self.record(EventKind.STRAGGLER, attempt=attempt, rank=rank, host=host, **told)
            case AskRanks(word):
                self._workers.say(word)
                self._log.info("the ranks were asked to save and end", why=self._state.moving or self._state.stop)
            case KillRanks(reason):
                self._workers.kill()
                if reason:
                    self._log.info("the ranks of the attempt are killed", why=reason)
            case RecordFault(attempt, fault, plan, page):
                self._record_fault(attempt, fault, plan, page)
            case Quarantine(host, evidence):
                self._log.error(f"host {host} gets no ranks any more: {'; '.join(evidence)}")
                self.record(EventKind.QUARANTINED, host=host, evidence=list(evidence))
            case RecordEnd(attempt, outcome):
                self.record(EventKind.ATTEMPT_ENDED, attempt=attempt, outcome=outcome)
            case Finish(outcome):
                self._finish(outcome)

    def _start(self, attempt: int, num_ranks: int, why: str) -> None:
        passing("controller.start")
        self._processes = {}
        try:
            self._run.open_attempt(attempt)  # before its ranks: those of the last one may live beyond a cut link
        except StoreError as error:
            self._start_failed = f"attempt {attempt} could not be started: {error}"
            return
        self._workers.start(attempt, num_ranks)
        self._log.info("attempt starts", attempt=attempt, ranks=num_ranks, why=why)
        self.record(EventKind.ATTEMPT_STARTED, attempt=attempt, ranks=num_ranks, host=self._host, why=why)

    def _record_fault(self, attempt: int, fault: Fault, plan: str, page: str) -> None:
        passing("controller.fault")
        where: dict[str, str] = {}
        if page:
            where["report"] = f"logs/attempt-{attempt:03d}/hang.txt"
            try:
                self._run.store.put(where["report"], page.encode())
            except StoreError as error:
                self._log.warning("the report of a hang could not be written", error=error)
            plan = f"Stacks of all ranks: {where['report']}. {plan}"
        self._log.error(f"{fault.text}\n{plan}")
        self.record(
            EventKind.FAULT,
            attempt=attempt,
            cause=str(fault.cause),
            rank=fault.rank,
            exit_code=fault.exit_code,
            message=fault.message,
            log_tail=fault.tail,
            **where,
        )

    def _finish(self, outcome: Outcome) -> None:
        if outcome.event == "failed":
            self.record(EventKind.FAILED, reason=outcome.reason, exit_code=outcome.exit_code)
        elif outcome.event != "fenced":
            reason = {"reason": outcome.reason} if outcome.reason else {}
            self.record(EventKind(outcome.event), step=outcome.step, **reason)
            try:
                self._run.clear_requests()
            except StoreError as error:  # the next start clears them; the end itself is still to be written
                self._log.warning("requests that are done could not be removed", error=error)
        deadline = time.monotonic() + JOURNAL_WITHIN_S
        while self._unwritten and not self._fenced and time.monotonic() < deadline:
            time.sleep(0.5)
            self._write()
        if self._unwritten and not self._fenced:
            self._write_last_word()
        if self._unwritten and not self._fenced:
            self._log.error("the end of the run could not be written into its journal", events=len(self._unwritten))
            failed = replace(outcome, exit_code=outcome.exit_code or ExitCode.FAILED)
            self._state = replace(self._state, outcome=failed)

    def _write_last_word(self) -> None:
        """On a full disk the journal has space for the end of the run, and for nothing before it."""
        kind, fields = self._unwritten[-1]
        try:
            self._journal.append(kind, **fields)
        except FencedError as error:
            self._fenced = str(error)
        except StoreError as error:
            self._log.warning("not even the last event could be written", error=error)
        else:
            lost = len(self._unwritten) - 1
            self._unwritten.clear()
            if lost:
                self._log.error("the disk was full: the journal lacks the events before the last", events=lost)

    def _take_events(self, news: News) -> int | None:
        """Journals what ranks tell; returns the newest committed step."""
        attempt = self._state.attempt
        if news.processes:
            self._processes.update(news.processes)
            if len(self._processes) == len(self._state.ranks):
                processes = [{**body, "rank": rank} for rank, body in sorted(self._processes.items())]
                self.record(EventKind.RANKS_STARTED, attempt=attempt, processes=processes)
        for note in news.notes:
            self._log.warning(note)
        if news.standbys_ready is not None:
            self.record(EventKind.STANDBYS_READY, attempt=attempt, ranks=news.standbys_ready)
        committed = None
        for _rank, line in news.events:
            fields = {key: value for key, value in line.items() if key not in ("event", "t", "attempt")}
            told = (attempt, str(line["event"]), fields.get("step"))
            kind = RANK_EVENTS.get(str(line["event"]))
            if kind is None or told in self._told:
                continue
            self._told.add(told)
            self.record(kind, attempt=attempt, **fields)
            if kind is EventKind.COMMITTED:
                committed = max(committed or 0, int(fields.get("step") or 0))
        return committed

    def _check_requests(self, now: float) -> None:
        if now - self._requests_t < REQUESTS_EVERY_S:
            return
        self._requests_t = now
        try:
            requests = self._run.pending_requests()
        except StoreError as error:
            self._log.warning("control requests could not be read", error=error)
            return
        if requests and self._stop not in (Stop.NOW, Stop.ABORT):
            self._stop = Stop.NOW if any(request.now for request in requests) else Stop.STOP

    def _check_lease(self, now: float) -> None:
        if now - self._lease_t < LEASE_EVERY_S or self._fenced:
            return
        self._lease_t = now
        try:
            self._lease.check()
        except FencedError as error:
            self._fenced = str(error)
        except StoreError as error:
            self._log.warning("the lease could not be read", error=error)

    def _write(self) -> None:
        self._write_t = time.monotonic()
        while self._unwritten and not self._fenced:
            kind, fields = self._unwritten[0]
            try:
                self._journal.append(kind, **fields)
            except FencedError as error:
                self._fenced = str(error)
            except StoreError as error:
                self._log.warning("a journal event could not be written; it is kept and tried again", error=error)
                return
            else:
                del self._unwritten[0]


def _still_quarantined(events: list[Event], since: float) -> frozenset[str]:
    """Hosts that an earlier controller of the run has left out not long ago."""
    return frozenset(
        str(event.fields["host"]) for event in events if event.kind == EventKind.QUARANTINED and event.t >= since
    )
