"""`pretrain train` and `pretrain resume`: a run on this machine, with a Ray of its own.

Takes a config (or an existing run) → trains it in the foreground, with progress in the terminal → exit
code. Ctrl-C asks the ranks to save (exit 5), again kills them (exit 5). Whatever ends this process, no
process outlives it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

from launch.clusters.local import LOOPBACK, local_ray, remove_leftovers
from launch.progress import Progress
from launch.session import ControllerLog, controlled, hold_run
from launch.terminal import outlive_terminal
from pretrain.config import ConfigChange, RunConfig, describe_changes, load_config, with_overrides
from pretrain.errors import ExitCode, UserError
from pretrain.log import Log
from pretrain.rundir import RunDirectory, home_url

if TYPE_CHECKING:
    from launch.controller.controller import Controller
    from launch.controller.state import Outcome


def run_train(args: argparse.Namespace) -> int:
    """Handler of `pretrain train`."""
    config = config_of(args)
    if args.dry_run:
        from launch.dry_run import dry_run

        return dry_run(config, resume=args.resume)
    run, changes = RunDirectory.claim(config, resume=args.resume)
    return train(run, config, changes, takeover=args.takeover)


def run_resume(args: argparse.Namespace) -> int:
    """Handler of `pretrain resume`."""
    run = RunDirectory.locate(args.run)
    renamed = [word for word in args.overrides if word.split("=", 1)[0].strip() == "name"]
    if renamed:
        raise UserError(
            f"{renamed[0]} cannot be changed by a resume. A run's name is that of its directory. To rename a run that "
            f"is not running: mv {run.url} NEW; to branch off, train run.yaml under another --name."
        )
    config = with_overrides(run.config(), args.overrides)
    home = os.path.dirname(run.url)
    run, changes = RunDirectory.claim(config.model_copy(update={"name": run.name}), resume="must", home=home)
    return train(run, config, changes, takeover=args.takeover)


def config_of(args: argparse.Namespace) -> RunConfig:
    """The config that a command line describes. Raises ConfigError."""
    named: Sequence[str] = []
    if args.name is not None:  # in quotes, for a name may be 7 or no; a script's None is none, here as in name=None
        named = [f"name={args.name if args.name == 'None' else json.dumps(args.name)}"]
    return load_config(args.config, [*args.overrides, *named])


def train(run: RunDirectory, config: RunConfig, changes: list[ConfigChange], *, takeover: bool) -> int:
    """Trains a claimed run on this machine to its end.

    Raises:
        PretrainError: it could not be started (held by another process, no such device, store failed).
    """
    with outlive_terminal():
        return _train(run, config, changes, takeover=takeover)


def _train(run: RunDirectory, config: RunConfig, changes: list[ConfigChange], *, takeover: bool) -> int:
    remove_leftovers()
    print(f"run {run.name} in {run.url}")
    print_changes(changes)
    if is_complete(run, config):
        print(f"nothing to do: the run is complete at step {config.schedule.total_steps}. {more_steps(run.name)}")
        return int(ExitCode.DONE)
    log = Log(stream=ControllerLog(run))
    progress = Progress(run, config.schedule.total_steps, after=run.next_attempt() - 1)
    cluster = config.cluster
    # Agents end before their Ray does, and both before the lease is given back.
    with (
        hold_run(run, changes, purpose="pretrain train", takeover=takeover, log=log) as lease,
        _Signals() as signals,
        local_ray(cluster.num_ranks + cluster.spare_ranks, cluster.device) as its_ray,
    ):
        from launch.agents.ray_nodes import RayNodes

        nodes = RayNodes(cluster.device)
        _check_slots(config, sum(offer.slots for offer in nodes.offers().values()))
        with controlled(
            run,
            config,
            lease,
            nodes,
            address=LOOPBACK,
            one_host=True,
            log=log,
            on_look=lambda state: progress.show(state.attempt),
        ) as controller:
            signals.ask(controller)
            outcome = controller.run()
            progress.show(run.next_attempt() - 1, last=True)
    code = report_end(run, outcome)
    its_ray.leave(code)
    return code


def print_changes(changes: list[ConfigChange]) -> None:
    """Tells what a resume changes in the config."""
    if changes:
        print("config changes:")
        for line in describe_changes(changes):
            print(f"  {line}")


def is_complete(run: RunDirectory, config: RunConfig) -> bool:
    """Whether a run has nothing left to train under this config."""
    status = run.status()
    return status.state == "completed" and status.step >= config.schedule.total_steps


def more_steps(name: str) -> str:
    return f"To train on: pretrain resume {name} schedule.total_steps=N"


def report_end(run: RunDirectory, outcome: Outcome) -> int:
    """Says how the run ended and what to do next; gives the exit code."""
    at = f" at step {outcome.step}" if outcome.step is not None else ""
    name = run.name if run.url == f"{os.path.abspath(home_url())}/{run.name}" else run.url
    match outcome.event:
        case "completed":
            print(f"completed{at}. Next:")
            print(f"  pretrain generate {name} --prompt '...'")
            print(f"  pretrain checkpoint list {name}")
        case "stopped" | "interrupted":
            saved = f"; the newest checkpoint is of step {outcome.step}" if outcome.step is not None else ""
            print(f"{outcome.event}{saved}. Go on with: pretrain resume {name}")
            if outcome.reason:
                print(f"note: {outcome.reason}", file=sys.stderr)
        case _:
            print(f"error: run {run.name} {outcome.event}: {outcome.reason}", file=sys.stderr)
            print(f"See pretrain logs {name}; when the cause is gone: pretrain resume {name}", file=sys.stderr)
    return int(outcome.exit_code)


def _check_slots(config: RunConfig, found: int) -> None:
    """This machine gets no new slots while we wait. Raises UserError."""
    cluster = config.cluster
    needed = cluster.min_ranks or cluster.num_ranks
    if found < needed:
        kind = "CPU slots" if cluster.device == "cpu" else "CUDA devices"
        raise UserError(
            f"cluster.num_ranks={cluster.num_ranks} needs {needed} {kind} and this machine has {found}. "
            f"A rank takes one. Set cluster.num_ranks={max(found, 1)}"
            + ("." if cluster.device == "cpu" else " or cluster.device=cpu.")
        )


class _Signals:
    """Ctrl-C, SIGTERM and a closed terminal become requests to the controller, once there is one."""

    _CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._controller: Controller | None = None
        self._count = 0

    def __enter__(self) -> _Signals:
        self._before = {number: signal.getsignal(number) for number in self._CAUGHT}
        self._install()
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def ask(self, controller: Controller) -> None:
        """From now on signals ask this controller. Ray has put its own handlers in place meanwhile."""
        self._controller = controller
        self._install()

    def _install(self) -> None:
        for number in self._CAUGHT:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        from launch.controller.state import Stop

        if self._controller is None:
            raise KeyboardInterrupt
        self._count += 1
        if self._count == 1:
            self._controller.ask(Stop.INTERRUPT)
            _say("saving a checkpoint and ending; again to end at once")
        else:
            self._controller.ask(Stop.ABORT)


def _say(text: str) -> None:
    """From a signal handler: a plain write, which no lock of a stream can block."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())
