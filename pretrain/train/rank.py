"""A rank's life: find its place, join the others, train, leave cleanly.

Under an agent the run exists and the controller holds its lease; this process borrows it. Standalone
(one process, or torchrun), rank 0 claims the run, holds the lease, writes the journal and polls the
control requests.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from pretrain.config import ConfigChange, RunConfig, describe_changes, load_config
from pretrain.engine.distributed import broadcast_bytes, gather_texts, start_process_group, stop_process_group, vote
from pretrain.errors import ExitCode, PretrainError, RunError, UserError
from pretrain.faults import arm, passing
from pretrain.log import Log
from pretrain.rundir import (
    JournalWriter,
    Lease,
    ProcessIdentity,
    ResumeMode,
    RunDirectory,
    this_process,
    wait_until_gone,
)
from pretrain.store import remove_leftovers
from pretrain.topology import World
from pretrain.train.build import Place, build_training
from pretrain.train.loop import train
from pretrain.train.out_of_memory import explain, explain_start, is_out_of_memory
from pretrain.train.reporter import JournalReporter, PipeReporter, Reporter, SilentReporter
from pretrain.train.stop import StopFlag
from pretrain.train.watch import Heartbeat, Watchdog, descriptor, die_with_parent, process_began


def run_under_agent(run_url: str, attempt: int, *, began: float | None = None) -> ExitCode:
    """One rank of an attempt that a controller started.

    Args:
        began: monotonic time at which this process became a rank; its own start if not given.

    Raises:
        PretrainError: of whichever room refuses.
    """
    die_with_parent()
    world = World.from_environment()
    arm("rank", rank=world.rank, attempt=attempt)
    log = Log(world.rank)
    stop = StopFlag(log)
    stop.watch_lifeline(descriptor("PRETRAIN_LIFELINE_FD"))
    stop.watch_signals()

    def on_training(step: int, stages: dict[str, float]) -> None:
        log.info("training", step=step, **stages)
        if world.is_main:
            heartbeat.event("training", attempt=attempt, step=step, stages=stages)

    heartbeat = Heartbeat(descriptor("PRETRAIN_HEARTBEAT_FD"), began=began or process_began(), on_training=on_training)
    heartbeat.phase("start", 0)
    heartbeat.stage("imports")
    run = locate_run(run_url)
    config = run.config()
    lease = Lease.borrow(run.store, os.environ.get("PRETRAIN_LEASE", ""))
    reporter: Reporter = PipeReporter(heartbeat) if world.is_main else SilentReporter()
    device = _prepare_device(config, world)
    with _process_group(config, world, device):
        heartbeat.stage("process_group")
        place = Place(run, world, device, attempt, _fence(run, attempt, lease), reporter, heartbeat, stop, log)
        return _train_here(config, place)


def locate_run(run_url: str) -> RunDirectory:
    """The run whose controller started this rank. Raises UserError where this node does not see it."""
    try:
        return RunDirectory.locate(run_url)
    except RunError:
        raise UserError(
            f"{run_url} is not seen on {socket.gethostname()}. Every rank writes its part of a checkpoint there, so "
            "all nodes must share it. Set PRETRAIN_HOME to a directory of a shared file system or to a URL such as "
            "s3://bucket/runs; pretrain doctor --address finds the nodes that do not see it."
        ) from None


def _fence(run: RunDirectory, attempt: int, lease: Lease) -> Callable[[], None]:
    """Raises FencedError when another controller or a later attempt of this one has the run."""

    def check() -> None:
        lease.check()
        run.check_attempt(attempt)

    return check


def run_standalone(
    path: str, overrides: Sequence[str], *, name: str | None, resume: ResumeMode, takeover: bool
) -> ExitCode:
    """One process or torchrun, no Ray, no supervision.

    Raises:
        PretrainError: of whichever room refuses.
    """
    named = [f"name={json.dumps(name)}"] if name is not None else []
    config = load_config(path, [*overrides, *named])
    world = World.from_environment()
    arm("rank", rank=world.rank)
    log = Log(world.rank if world.size > 1 else None)
    stop = StopFlag(log)
    stop.watch_signals()
    heartbeat = Heartbeat()
    watchdog = Watchdog(
        heartbeat,
        limit_s=config.health.heartbeat_timeout_s,
        start_limit_s=config.health.start_timeout_s,
        log=log,
    )
    device = _prepare_device(config, world)
    with _process_group(config, world, device), contextlib.closing(watchdog), contextlib.ExitStack() as resources:
        run, attempt, lease, journal = _claim(config, world, resume=resume, takeover=takeover, log=log)
        reporter: Reporter = SilentReporter()
        if lease and journal:
            resources.enter_context(lease)
            stop.watch_requests(run.pending_requests)
            if config.cluster.time_limit_s is not None:
                stop.watch_clock(config.cluster.time_limit_s)
            reporter = JournalReporter(journal)
        guard = lease.check if lease else _never_publishes
        place = Place(run, world, device, attempt, guard, reporter, heartbeat, stop, log)
        try:
            return _train_here(config, place)
        except PretrainError as error:
            if not isinstance(error, UserError) or error.exit_code is not ExitCode.FENCED:
                _report_failure(reporter, error)
            raise


def _claim(
    config: RunConfig, world: World, *, resume: ResumeMode, takeover: bool, log: Log
) -> tuple[RunDirectory, int, Lease | None, JournalWriter | None]:
    """Rank 0 takes the run; all learn where it is and which attempt this is. A collective."""
    run: RunDirectory | None = None
    lease: Lease | None = None
    journal: JournalWriter | None = None
    attempt, problem = 0, None
    if world.is_main:
        try:
            run, changes = RunDirectory.claim(config, resume=resume)
            lease = Lease.acquire(run.store, purpose="python -m pretrain", takeover=takeover)
            lease.start_renewing()
            wait_until_gone(_earlier_ranks(run))
            remove_leftovers(run.store)
            run.clear_requests()
            attempt = run.next_attempt()
            journal = run.journal(lease)
            _open_journal(journal, changes, attempt, world, log)
        except PretrainError as error:
            problem = error
            if lease:
                lease.release()
    vote(not isinstance(problem, UserError), str(problem), error=UserError)
    vote(problem is None, str(problem))
    told = broadcast_bytes(f"{attempt} {run.url}".encode() if run else None).decode()
    number, _, url = told.partition(" ")
    processes = [
        json.loads(text) for text in gather_texts(json.dumps({**this_process().to_json(), "rank": world.rank}))
    ]
    if journal:
        journal.append("ranks_started", attempt=attempt, processes=processes)
    return run or RunDirectory.locate(url), int(number), lease, journal


def _open_journal(journal: JournalWriter, changes: list[ConfigChange], attempt: int, world: World, log: Log) -> None:
    if attempt == 1:
        journal.append("created")
    if changes:
        for line in describe_changes(changes):
            log.info(f"config change: {line}")
        journal.append("config_changed", changes=describe_changes(changes))
    host = this_process().host
    journal.append("attempt_started", attempt=attempt, ranks=world.size, host=host, why="python -m pretrain")


def _earlier_ranks(run: RunDirectory) -> list[ProcessIdentity]:
    """Ranks of earlier attempts by the journal; those on this host must be gone before a new one trains."""
    starts = [event for event in run.events() if event.kind == "ranks_started"]
    return [ProcessIdentity.from_json(entry) for event in starts for entry in event.fields["processes"]]


def _train_here(config: RunConfig, place: Place) -> ExitCode:
    passing("start.process_group")
    try:
        training = build_training(config, place)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise explain_start(config, place.device, error) from error
    passing("start.built")
    try:
        return train(training)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise explain(training, error) from error
    finally:
        training.close()


def _report_failure(reporter: Reporter, error: PretrainError) -> None:
    with contextlib.suppress(PretrainError):
        reporter.event("failed", reason=str(error), exit_code=int(error.exit_code))


def _never_publishes() -> None:
    """Guard of ranks other than 0 in a standalone run: only rank 0 publishes."""


def _prepare_device(config: RunConfig, world: World) -> torch.device:
    """The rank's device, threads set. Raises UserError where there is no such device."""
    torch.set_num_threads(config.cluster.threads_per_rank)
    if config.cluster.device == "cpu":
        return torch.device("cpu")
    if world.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"cluster.device=cuda, but rank {world.rank} needs visible CUDA device {world.local_rank} and "
            f"{torch.cuda.device_count()} are visible. A rank takes the device of its local rank. "
            "Start fewer ranks per node or set cluster.device=cpu."
        )
    torch.cuda.set_device(world.local_rank)
    return torch.device("cuda", world.local_rank)


@contextmanager
def _process_group(config: RunConfig, world: World, device: torch.device) -> Iterator[None]:
    mine = start_process_group(world, device, config.health.collective_timeout_s)
    try:
        yield
    finally:
        if mine:
            stop_process_group()
