"""What every way of starting a run shares: take its lease, open its journal, control it to its end.

Takes a claimed run directory and slots → the outcome. `launch.train` gives it a Ray of its own,
`launch.job` the Ray of the cluster that its job runs on.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from launch.agents.agent import THIS_PYTHON
from launch.controller.attempt import RankSetting
from launch.controller.controller import Controller, limits_of
from launch.controller.crew import Crew, Nodes
from launch.controller.state import RunState
from launch.monitor.ray_metrics import exported_through_ray
from pretrain.config import ConfigChange, RunConfig, describe_changes
from pretrain.errors import PretrainError, UserError
from pretrain.faults import arm
from pretrain.log import Log
from pretrain.rundir import EventKind, JournalWriter, Lease, ProcessIdentity, RunDirectory, wait_until_gone
from pretrain.store import remove_leftovers

CONTROLLER_LOG = "logs/controller.log"
EVALUATOR_LOG = "logs/evaluator.log"
RANK_COMMAND_VARIABLE = "PRETRAIN_RANK_COMMAND"  # JSON list; tests put ranks there that do not train
AGENT_SILENT_S = 3.0
# On the controller's own host silence is a busy machine, not a cut cable: a dead agent closes its connection.
LOCAL_AGENT_SILENT_S = 15.0


@contextmanager
def hold_run(
    run: RunDirectory,
    changes: list[ConfigChange],
    *,
    purpose: str,
    takeover: bool,
    log: Log,
    keep_requests: bool = False,
) -> Iterator[Lease]:
    """The run's lease, its journal opened, nothing of earlier attempts alive on this host.

    What ends the context by an exception is the run's last journal event. `keep_requests`: those that are
    pending are meant for this start.

    Raises:
        LeaseHeldError: another process holds the run.
    """
    arm("controller")
    lease = Lease.acquire(run.store, purpose=purpose, takeover=takeover)
    lease.start_renewing()
    with contextlib.closing(_Released(lease)):
        killed = wait_until_gone(_earlier_ranks(run))
        if killed:
            log.warning("ranks of an earlier attempt had to be killed", ranks=", ".join(map(str, killed)))
        remove_leftovers(run.store)
        journal = run.journal(lease)
        if not keep_requests:
            run.clear_requests()
        try:
            _open_journal(run, journal, changes, takeover)
            yield lease
        except (KeyboardInterrupt, SystemExit):  # while it starts, Ray turns SIGTERM into SystemExit(15)
            with contextlib.suppress(PretrainError):  # asked to end it ends so, whatever the store says
                journal.append(EventKind.INTERRUPTED, step=None)
            raise KeyboardInterrupt from None
        except PretrainError as error:
            with contextlib.suppress(PretrainError):  # of a lost lease or a full disk the first error tells
                journal.append(EventKind.FAILED, reason=str(error), exit_code=int(error.exit_code))
            raise


@dataclass(frozen=True, slots=True)
class _Released:
    """Gives a lease back even where the store fails: its holder's death frees it anyway."""

    lease: Lease

    def close(self) -> None:
        with contextlib.suppress(PretrainError):
            self.lease.release()


def _open_journal(run: RunDirectory, journal: JournalWriter, changes: list[ConfigChange], takeover: bool) -> None:
    if not run.events():
        journal.append(EventKind.CREATED)
    if takeover:
        journal.append(EventKind.TAKEOVER, host=socket.gethostname())
    if changes:
        journal.append(EventKind.CONFIG_CHANGED, changes=describe_changes(changes))


def _earlier_ranks(run: RunDirectory) -> list[ProcessIdentity]:
    """Ranks of earlier attempts by the journal; those on this host must be gone before a new one trains."""
    starts = [event for event in run.events() if event.kind == EventKind.RANKS_STARTED]
    return [ProcessIdentity.from_json(entry) for event in starts for entry in event.fields["processes"]]


@contextmanager
def controlled(
    run: RunDirectory,
    config: RunConfig,
    lease: Lease,
    nodes: Nodes,
    *,
    address: str,
    one_host: bool,
    log: Log,
    on_look: Callable[[RunState], None] = lambda state: None,
) -> Iterator[Controller]:
    """A controller with its crew; the agents end with the context.

    Args:
        address: IP address of this host that agents reach.
        one_host: all agents run on this host.
    """
    cluster = config.cluster
    setting = RankSetting(
        run_url=run.url,
        command=_rank_command(),
        lease_token=lease.token,
        device=cluster.device,
        threads_per_rank=cluster.threads_per_rank,
        environment=cluster.environment,
    )
    silent_s = LOCAL_AGENT_SILENT_S if one_host else AGENT_SILENT_S
    crew = Crew(nodes, setting, RunLogs(run), address, silent_s)
    try:
        limits = limits_of(config, one_host=one_host)
        with exported_through_ray(run, log, wanted=config.metrics.prometheus.through_ray):
            measured = config.eval.checkpoints
            finish_s = measured.finish_s if measured else 0.0
            host = socket.gethostname()
            yield Controller(run, lease, crew, limits, host=host, log=log, finish_s=finish_s, on_look=on_look)
    finally:
        crew.close()


class RunLogs:
    """Logs of ranks lie in the run directory; where that is an object store, agents copy them there."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def of(self, attempt: int, rank: int) -> dict[str, str | None]:
        return self._place(self._run.log_key(attempt, rank))

    def of_evaluator(self) -> dict[str, str | None]:
        return self._place(EVALUATOR_LOG)

    def _place(self, key: str) -> dict[str, str | None]:
        path = self._run.store.local_path(key)
        return {"log": str(path) if path else None, "log_url": self._run.url, "log_key": key}


class ControllerLog:
    """A text stream for `Log`: stderr, and the run's `logs/controller.log` where the store can append."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._kept = True

    def write(self, text: str) -> int:
        sys.stderr.write(text)
        if self._kept:
            try:
                self._run.store.append(CONTROLLER_LOG, text.encode())
            except PretrainError:  # an object store, or a full disk: the journal tells the same
                self._kept = False
        return len(text)

    def flush(self) -> None:
        sys.stderr.flush()


def _rank_command() -> list[str]:
    given = os.environ.get(RANK_COMMAND_VARIABLE)
    if not given:
        return [THIS_PYTHON, "-m", "pretrain"]
    try:
        command = json.loads(given)
    except ValueError:
        command = None
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command) or not command:
        raise UserError(f"{RANK_COMMAND_VARIABLE}={given!r} is not a JSON list of words. Unset it.")
    return command
