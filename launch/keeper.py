"""The keeper of a submitted run: starts its driver again when it dies, until the journal is terminal.

Nobody restarts the driver of a Ray job. A detached actor without a CPU, on the driver's node, restarted
by Ray, one per run (named by its directory), looks every second. It ends when the run is over, when the
job was stopped on purpose, or when the driver says that starting again cannot help. Own design.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import threading
import time
from typing import Any

import ray
from ray.job_submission import JobStatus, JobSubmissionClient
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from launch.agents.ray_nodes import NORMAL_PRIORITY
from launch.job import entrypoint, new_submission_id
from pretrain.errors import ExitCode, PretrainError
from pretrain.faults import arm, passing
from pretrain.log import Log
from pretrain.rundir import RunDirectory
from pretrain.rundir.journal import TERMINAL_KINDS

NAMESPACE = "pretrain"
LOOK_EVERY_S = 1.0
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
HEALTHY_AFTER_S = 120.0  # a driver that lived so long starts the backoff anew
# A driver that ends so says that another one would end the same way.
HOPELESS = frozenset({ExitCode.USER_ERROR, ExitCode.FENCED})


def keep(run: RunDirectory, lease: int) -> threading.Thread:
    """Makes sure that the calling driver's run has a keeper, and that it watches this driver.

    The keeper's process takes a second or more to start; the driver's agents start beside it.

    Args:
        lease: number of the driver's lease; only journal events from it on end the keeper.

    Returns:
        the thread that waits until the keeper has answered.
    """
    context = ray.get_runtime_context()
    submission = _own_submission_id()
    environment = {key: value for key, value in dict(context.runtime_env).items() if key in ("working_dir", "env_vars")}
    actor = ray.remote(Keeper).options(
        name=keeper_name(run.url),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=0,
        runtime_env=NORMAL_PRIORITY,
        scheduling_strategy=NodeAffinitySchedulingStrategy(context.get_node_id(), soft=True),
    )

    def introduce() -> None:
        for _ in range(3):
            try:
                ray.get(make().watch.remote(submission, lease), timeout=30.0)
                return
            except ray.exceptions.GetTimeoutError:  # a busy cluster: it may still come up
                break
            except ray.exceptions.RayActorError:  # the keeper of an earlier submission was just ending
                time.sleep(1.0)
        Log().warning(
            "no keeper has answered: until one does, a dead driver will not be started again; use pretrain submit "
            "--resume"
        )

    def make() -> Any:
        return actor.remote(run.url, environment, submission, lease)

    make()  # Ray knows of it when this returns, and makes it also if this driver dies at once
    thread = threading.Thread(target=introduce, name="keeper's answer", daemon=True)
    thread.start()
    return thread


def keeper_name(run_url: str) -> str:
    return f"keeper-{hashlib.sha256(run_url.encode()).hexdigest()[:16]}"


def _own_submission_id() -> str:
    """The id of the Ray job that this process is the driver of."""
    metadata = ray._private.worker.global_worker.core_worker.get_job_config().metadata
    return str(dict(metadata).get("job_submission_id", ""))


class Keeper:
    """The actor. Ray runs its constructor again after a crash: all it needs is in the arguments or in Ray."""

    def __init__(self, run_url: str, runtime_env: dict[str, Any], submission: str, lease: int) -> None:
        arm("keeper")
        client = JobSubmissionClient(ray.get_runtime_context().gcs_address)
        self._watch = Watch(client, run_url, runtime_env, submission, lease)
        threading.Thread(target=self._keep, name="keep", daemon=True).start()

    def watch(self, submission: str, lease: int) -> None:
        """A driver has taken the run: watch that one."""
        self._watch.begin(submission, lease)

    def _keep(self) -> None:
        self._watch.until_over()
        with contextlib.suppress(Exception):
            ray.kill(ray.get_actor(keeper_name(self._watch.run_url), namespace=NAMESPACE), no_restart=True)


class Watch:
    """What the keeper does, on any client of the Jobs API.

    A driver that the lease refuses, because another one holds the run, is a job of the run too, and says that it is
    hopeless. So nothing is over while any job of the run lives, and of those that have ended the last one counts.
    """

    def __init__(self, client: Any, run_url: str, runtime_env: dict[str, Any], submission: str, lease: int) -> None:
        self.run_url = run_url
        self._client, self._runtime_env = client, runtime_env
        self._log = Log(stream=sys.stderr)
        self._wait_s = FIRST_WAIT_S
        self.begin(submission, lease)

    def begin(self, submission: str, lease: int) -> None:
        """A driver has taken the run."""
        self._submission, self._lease = submission, lease
        self._since_t = time.monotonic()

    def until_over(self) -> None:
        """Returns once nobody has to watch the run any more."""
        while True:
            time.sleep(LOOK_EVERY_S)
            try:
                if self.is_over():
                    return
            except Exception as error:  # Ray or the store cannot be asked now; the next look may
                self._log.warning("the keeper could not look", run=self.run_url, error=error)

    def is_over(self) -> bool:
        """One look; starts the driver again if it died."""
        passing("keeper.look")
        ended = self._last_ended()
        if ended is None:
            return False
        if ended.status == JobStatus.STOPPED or ended.driver_exit_code in HOPELESS or self._is_terminal():
            return True
        if time.monotonic() - self._since_t > HEALTHY_AFTER_S:
            self._wait_s = FIRST_WAIT_S
        time.sleep(self._wait_s)
        now = self._last_ended()
        if now is None or now.submission_id != ended.submission_id:
            return False  # somebody has sent the run again meanwhile
        self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)
        name = self.run_url.rstrip("/").rsplit("/", 1)[-1]
        passing("keeper.submit")
        self._submission = self._client.submit_job(
            entrypoint=entrypoint(self.run_url, "--again"),
            submission_id=new_submission_id(name),
            runtime_env=self._runtime_env,
            metadata={"pretrain_run": self.run_url},
        )
        self._since_t = time.monotonic()
        return False

    def _last_ended(self) -> Any:
        """Of the jobs of the run the one that ended last; None while one of them lives."""
        jobs = [job for job in self._client.list_jobs() if (job.metadata or {}).get("pretrain_run") == self.run_url]
        jobs = jobs or [self._client.get_job_info(self._submission)]
        if not all(job.status.is_terminal() for job in jobs):
            return None
        return max(jobs, key=lambda job: (job.end_time or 0, job.start_time or 0))

    def _is_terminal(self) -> bool:
        try:
            events = RunDirectory.locate(self.run_url).events()
        except PretrainError as error:
            self._log.warning("the journal could not be read", run=self.run_url, error=error)
            return False
        return bool(events) and events[-1].kind in TERMINAL_KINDS and events[-1].lease >= self._lease
