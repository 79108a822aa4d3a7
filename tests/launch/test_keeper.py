"""What the keeper of a run does about the jobs of it that Ray knows: looks made by hand, no Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.job_submission import JobDetails, JobStatus, JobType

from launch import keeper
from pretrain.rundir import EventKind, Lease, RunDirectory
from tests.launch.runs import config_for


class Jobs:
    """Of Ray's Jobs API: jobs, and those that were submitted."""

    def __init__(self, run_url: str) -> None:
        self._run_url = run_url
        self.jobs: list[JobDetails] = []
        self.sent: list[dict[str, Any]] = []

    def add(self, name: str, status: JobStatus, *, ended: int | None = None, code: int | None = None) -> None:
        known = {"type": JobType.SUBMISSION, "entrypoint": "", "metadata": {"pretrain_run": self._run_url}}
        times = {"start_time": len(self.jobs) + 1, "end_time": ended}
        self.jobs.append(JobDetails(submission_id=name, status=status, driver_exit_code=code, **known, **times))

    def list_jobs(self) -> list[JobDetails]:
        return list(self.jobs)

    def submit_job(self, **job: Any) -> str:
        self.sent.append(job)
        return str(job["submission_id"])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setattr(keeper, "FIRST_WAIT_S", 0.01)
    run, _ = RunDirectory.claim(config_for(tmp_path, fake={"steps": 9}), resume="never", home=str(tmp_path / "home"))
    return run


def watch(jobs: Jobs, run: RunDirectory) -> keeper.Watch:
    return keeper.Watch(jobs, run.url, {}, "first", 1)


def test_a_second_driver_that_the_lease_refused_does_not_end_the_keeper_of_the_first(run: RunDirectory) -> None:
    jobs = Jobs(run.url)
    jobs.add("first", JobStatus.RUNNING)
    jobs.add("second", JobStatus.FAILED, ended=5, code=2)
    kept = watch(jobs, run)
    assert not kept.is_over()
    assert jobs.sent == []
    jobs.jobs.pop(0)
    jobs.add("first", JobStatus.FAILED, ended=9, code=-9)  # it dies later, and is started again
    assert not kept.is_over()
    (sent,) = jobs.sent
    assert sent["entrypoint"].endswith(f"{run.url} --again")
    assert sent["metadata"] == {"pretrain_run": run.url}


def test_what_is_sent_while_the_keeper_waits_is_not_sent_twice(run: RunDirectory) -> None:
    jobs = Jobs(run.url)
    jobs.add("first", JobStatus.FAILED, ended=5, code=-9)
    kept = watch(jobs, run)
    look = iter([list(jobs.jobs)])
    jobs.add("by hand", JobStatus.PENDING)
    later = jobs.list_jobs
    jobs.list_jobs = lambda: next(look, None) or later()  # type: ignore[method-assign]
    assert not kept.is_over()
    assert jobs.sent == []


@pytest.mark.parametrize(("status", "code"), [(JobStatus.STOPPED, None), (JobStatus.FAILED, 2), (JobStatus.FAILED, 7)])
def test_a_stopped_job_and_a_hopeless_driver_end_the_keeper(
    run: RunDirectory, status: JobStatus, code: int | None
) -> None:
    jobs = Jobs(run.url)
    jobs.add("first", status, ended=5, code=code)
    assert watch(jobs, run).is_over()
    assert jobs.sent == []


def test_the_end_of_the_run_ends_the_keeper_and_that_of_an_earlier_lease_does_not(run: RunDirectory) -> None:
    jobs = Jobs(run.url)
    jobs.add("first", JobStatus.FAILED, ended=5, code=3)
    with Lease.acquire(run.store, purpose="test") as lease:
        run.journal(lease).append(EventKind.FAILED, reason="a crash loop", exit_code=3)
    kept = watch(jobs, run)
    assert kept.is_over()
    kept.begin("second", lease.number + 1)
    assert not kept.is_over()
    assert len(jobs.sent) == 1
