"""`pretrain submit`: packs code and config, hands them to a Ray cluster as a job, returns at once.

Takes a config and an address → a Ray job whose driver is `launch.driver`. The run directory is claimed
here, so that a name that exists or a refused change is an error before anything is submitted. Data,
tokenizer and run directory must lie where the cluster sees them under the same path or URL.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pretrain
from launch.session import RANK_COMMAND_VARIABLE
from launch.train import config_of, is_complete, more_steps, print_changes
from pretrain.config import RunConfig, dump_yaml
from pretrain.errors import ExitCode, LeaseHeldError, UserError
from pretrain.rundir import RunDirectory, home_url
from pretrain.rundir.lease_file import DEAD_AFTER_S, is_held, newest_lease, newest_number
from pretrain.rundir.submission import write_submission
from pretrain.store import open_store

SUBMIT_WITHIN_S = 60.0
CONFIG_FILE = "submitted.yaml"
_SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
STOP_WAIT_S = 120  # `ray job stop` waits so long for the checkpoint before it kills the driver


def run_submit(args: argparse.Namespace) -> int:
    """Handler of `pretrain submit`."""
    config = config_of(args)
    client = connect(args.address)
    is_new = not open_store(home_url()).exists(f"{config.name}/run.yaml")
    run, changes = RunDirectory.claim(config, resume=args.resume)
    if not args.takeover and not _comes_free(run, wait=args.wait):
        _refuse_held(run)
    print_changes(changes)
    if is_complete(run, config):
        print(f"nothing to do: the run is complete at step {config.schedule.total_steps}. {more_steps(run.name)}")
        return int(ExitCode.DONE)
    before = newest_number(run.store)
    run.clear_requests()  # here and not by the driver, which may take a minute to begin: from now on they are for it
    try:
        submission = submit(client, run, config, "--takeover" if args.takeover else "--first")
    except UserError:
        if is_new:  # or the name would be taken by a run that never was
            run.store.delete("run.yaml")
        raise
    write_submission(run.store, submission, lease=before)
    _tell_what_stays(os.environ)
    if args.wait:
        from launch.wait import wait_for_end

        print(f"run {run.name} in {run.url}, Ray job {submission}", flush=True)
        return wait_for_end(run, client, submission, newer_than=before)
    print(run.name)
    print(f"submitted as Ray job {submission}; it runs in {run.url}", file=sys.stderr)
    print(f"next: pretrain status {run.name}; pretrain logs -f {run.name}; pretrain stop {run.name}", file=sys.stderr)
    return int(ExitCode.DONE)


def submit(client: Any, run: RunDirectory, config: RunConfig, option: str) -> str:
    """Hands the driver to the cluster; gives Ray's id of the job. Raises UserError when it takes no jobs."""
    with tempfile.TemporaryDirectory(prefix="pretrain-submit-") as folder:
        pack(Path(folder), config)
        deadline = time.monotonic() + SUBMIT_WITHIN_S
        while True:
            try:
                submission = client.submit_job(
                    entrypoint=entrypoint(run.url, option),
                    submission_id=new_submission_id(run.name),
                    runtime_env={"working_dir": folder, "env_vars": driver_environment()},
                    metadata={"pretrain_run": run.url},
                )
                return str(submission)
            except (RuntimeError, OSError) as error:  # a cluster that has just started answers 500 for a while
                if time.monotonic() > deadline:
                    raise UserError(
                        f"the Ray cluster takes no job: {_first_line(error)}. It must have a living head with a "
                        "dashboard agent. Look at `ray status` and the dashboard, then submit again."
                    ) from None
                time.sleep(1.0)


def connect(address: str) -> Any:
    """A client of the Jobs API at an http address, or of the Ray at `host:port` or `auto`. Raises UserError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray.job_submission import JobSubmissionClient

    for module in ("dashboard.modules.dashboard_sdk", "_private.runtime_env.packaging"):
        logging.getLogger(f"ray.{module}").setLevel(logging.WARNING)  # they tell of each upload
    try:
        return JobSubmissionClient(address)
    except Exception as error:  # Ray raises many kinds, RuntimeError and ConnectionError among them
        raise UserError(
            f"--address={address} does not answer: {_first_line(error)}. It must be the Jobs API of a running Ray "
            "(http://HEAD:8265), HOST:6379 or auto. Correct it, and set RAY_AUTH_MODE and RAY_AUTH_TOKEN as the "
            "cluster has them."
        ) from None


def pack(folder: Path, config: RunConfig) -> None:
    """The product's code and the resolved config, as the job's working directory: nothing else goes along."""
    source = Path(pretrain.__file__).parent.parent
    for package in ("pretrain", "launch"):
        shutil.copytree(source / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / CONFIG_FILE).write_text(dump_yaml(config))


def entrypoint(run_url: str, *options: str) -> str:
    """The driver's shell command: this very interpreter where the cluster has it, else the one on its PATH."""
    words = ["-m", "launch.driver", run_url, *options]
    python = shlex.quote(sys.executable)
    # Looked for, not imported: that takes half a second on an idle machine.
    has_ray = "from importlib.util import find_spec; raise SystemExit(find_spec('ray') is None)"
    return f'P={python}; "$P" -c "{has_ray}" 2>/dev/null || P=python; exec "$P" {shlex.join(words)}'


def new_submission_id(name: str) -> str:
    """Ray refuses an id twice, so it holds the moment."""
    return f"pretrain-{name}-{time.time_ns() // 1_000_000}"


def driver_environment() -> dict[str, str]:
    """Variables that the job's processes need from this side."""
    kept = {name: os.environ[name] for name in (RANK_COMMAND_VARIABLE,) if name in os.environ}
    return {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S), **kept}


def _tell_what_stays(environ: Mapping[str, str]) -> None:
    """A job has the environment of its nodes: secrets of this shell are not sent through Ray, which logs them."""
    here = [name for name in _SECRETS if environ.get(name)]
    if here:
        print(
            f"note: {', '.join(here)} of this shell stays here. Nodes that need it must have it in their environment",
            file=sys.stderr,
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _comes_free(run: RunDirectory, *, wait: bool) -> bool:
    """Whether nobody holds the run; a scheduler may restart it before a dead holder has been silent for long enough."""
    first = newest_lease(run.store)
    deadline = time.monotonic() + (DEAD_AFTER_S + 1.0 if wait else 0.0)
    lease = first
    while lease is not None and first is not None and is_held(lease, time.time()):
        if lease.number != first.number or lease.renewed_at != first.renewed_at or time.monotonic() >= deadline:
            return False
        time.sleep(1.0)
        lease = newest_lease(run.store)
    return True


def _refuse_held(run: RunDirectory) -> None:
    lease = newest_lease(run.store)
    if lease and is_held(lease, time.time()):
        raise LeaseHeldError(
            f"{run.url} is held by {lease.holder} ({lease.purpose}, lease {lease.number}). Only one process may train "
            f"a run. Wait for it, stop it with pretrain stop {run.name}, or, if it is certainly gone, use --takeover."
        )
