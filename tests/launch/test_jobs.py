"""Submitted runs whose driver, keeper or whole Ray is killed: they end as a run that nobody hurt, bit for bit.

Everything as a user does it: `pretrain cluster up`, `submit`, `status`, `stop`, `cluster down`, with real ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pretrain.rundir import Event, RunDirectory
from tests.chaos.verdict import differences, leftovers
from tests.launch.runs import ROOT
from tests.ranks import run_ranks
from tests.tiny import Tiny, build_tiny
from tests.train.rank_programs import trainings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS, SAVE_EVERY, SLOW_S = 16, 4, 1.0
RUN = (f"schedule.total_steps={STEPS}", f"checkpoint.every_steps={SAVE_EVERY}", "cluster.num_ranks=2",
       "checkpoint.keep_last=9")  # fmt: skip


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tiny, RunDirectory]:
    """Text, and a run of two ranks without Ray, agents or faults."""
    folder = tmp_path_factory.mktemp("untouched")
    tiny = build_tiny(folder)
    arguments = {"runs": [tiny.decoder("name=calm", *RUN)], "home": str(folder)}
    assert [rank.value for rank in run_ranks(trainings, ranks=2, arguments=arguments, timeout_s=120)] == [[0]] * 2
    return tiny, RunDirectory.locate(str(folder / "calm"))


class Cluster:
    """Two nodes of one slot each in a temporary folder of their own; steps take a second, so that faults meet them."""

    def __init__(self, folder: Path, temporary: Path, **environment: str) -> None:
        self.home, self.temporary, self.mark = folder / "home", temporary, str(folder)
        plan = folder / "faults.json"
        plan.write_text(json.dumps([{"point": "step.begins", "do": f"sleep:{SLOW_S}", "rank": 0, "times": 10**6}]))
        self._base = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "PRETRAIN_HOME": str(self.home), "PRETRAIN_FAULTS": str(plan), "PRETRAIN_TRIAL": self.mark,
            "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment,
        }  # fmt: skip
        self.environment = self._base

    def pretrain(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "launch.cli", *words], env=self.environment, cwd=self.temporary,
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip

    def up(self) -> None:
        started = self.pretrain("cluster", "up", "--nodes", "2")
        assert started.returncode == 0, started.stderr
        pairs = [word.split("=", 1) for word in shlex.split(started.stdout) if "=" in word]
        self.environment = {**self._base, **dict(pairs)}

    def down(self) -> None:
        ended = self.pretrain("cluster", "down")
        assert ended.returncode == 0, ended.stderr
        self.environment = self._base

    def processes(self, *marks: str) -> list[psutil.Process]:
        """Those of this cluster whose command line holds all of the marks."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = process.environ().get("RAY_TMPDIR", "").startswith(str(self.temporary))
                line = " ".join(process.cmdline())
                if ours and process.status() != psutil.STATUS_ZOMBIE and all(mark in line for mark in marks):
                    found.append(process)
        return found

    def kill(self, victim: str) -> None:
        marks = {"driver": "launch.driver", "keeper": "ray::Keeper", "head": "gcs_server"}
        (process,) = [one for one in self.processes(marks[victim]) if "job_supervisor" not in one.name()][:1]
        process.kill()
        wait_for(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    temporary = Path(tempfile.mkdtemp(prefix="j", dir="/tmp"))  # short: Ray's sockets lie below it
    cluster = Cluster(tmp_path, temporary)
    cluster.up()
    yield cluster
    cluster.down()
    assert cluster.processes() == []
    assert list(temporary.iterdir()) == []
    shutil.rmtree(temporary)


def wait_for(what: Callable[[], object], within_s: float = 240.0) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.1)


@pytest.mark.parametrize("victims", ["driver", "keeper", "keeper driver", "head"])
def test_a_submitted_run_ends_bit_for_bit_whatever_of_its_job_is_killed(
    cluster: Cluster, untouched: tuple[Tiny, RunDirectory], victims: str
) -> None:
    tiny, calm = untouched
    words = ("submit", *tiny.decoder("name=torn", *RUN, "cluster.standbys=false"), "--address", "auto")
    sent = cluster.pretrain(*words, "--resume", "auto")
    assert (sent.returncode, sent.stdout) == (0, "torn\n"), sent.stderr
    run = RunDirectory.locate(str(cluster.home / "torn"))

    def events(kind: str) -> list[Event]:
        return [event for event in run.events() if event.kind == kind]

    wait_for(lambda: events("committed"))
    wait_for(lambda: cluster.processes("ray::Keeper"))
    ranks = [entry["pid"] for event in events("ranks_started") for entry in event.fields["processes"]]
    for victim in victims.split():
        cluster.kill(victim)
    if victims == "keeper":  # training does not feel it, and the new one starts a dead driver again
        wait_for(lambda: cluster.processes("ray::Keeper"))
        assert all(psutil.pid_exists(pid) for pid in ranks)
        cluster.kill("driver")
    if victims == "head":
        wait_for(lambda: not any(psutil.pid_exists(pid) for pid in ranks))
        cluster.down()
        cluster.up()
        again = cluster.pretrain(*words, "--resume", "auto")
        assert (again.returncode, again.stdout) == (0, "torn\n"), again.stderr
    wait_for(lambda: events("completed"))
    assert not any(psutil.pid_exists(pid) for pid in ranks)
    assert len(events("attempt_started")) == 2
    assert differences(calm, run, STEPS) == []
    cluster.down()
    assert leftovers(run, cluster.mark, cluster.temporary) == []
