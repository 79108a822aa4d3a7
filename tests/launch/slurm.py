"""A Slurm of its own on this machine, from Debian's packages: munge, controller and a daemon per virtual node.

Nothing of the system is touched: own key, sockets, ports and spool in one folder. Nodes are 127.0.0.11 and up.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")

CONF = """\
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={control_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=15
KillWait=5
MinJobAge=3600
JobRequeue=1
SlurmdParameters=config_overrides
NodeName=DEFAULT CPUs=2 RealMemory=20000
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.[11-{last}] Port=[{first_port}-{last_port}]
PartitionName=DEFAULT Nodes=n[1-{nodes}] MaxTime=INFINITE State=UP
PartitionName=main Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high PriorityTier=10 PreemptMode=OFF
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
"""


@dataclass(frozen=True)
class Slurm:
    """A running Slurm; `environment` makes its commands talk to it."""

    folder: Path
    environment: Mapping[str, str]

    def run(self, *words: str) -> str:
        done = subprocess.run(words, env=dict(self.environment), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, script: Path, *options: str, **environment: str) -> int:
        """Hands a script to sbatch; gives the job's number."""
        done = subprocess.run(
            ["sbatch", "--parsable", *options, str(script)],
            env={**self.environment, **environment},
            cwd=script.parent,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def job(self, number: int) -> dict[str, str]:
        """What `scontrol show job` says, by key."""
        words = self.run("scontrol", "-o", "show", "job", str(number)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def log(self, name: str) -> str:
        return (self.folder / name).read_text(errors="replace") if (self.folder / name).exists() else ""

    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """What runs in its jobs, on one node or on all: the jobs' own processes and the daemons of their steps."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                variables = process.environ()
                ours = variables.get("SLURM_CONF") == self.environment["SLURM_CONF"] and "SLURM_JOB_ID" in variables
                if ours and node in (None, variables.get("SLURMD_NODENAME")):
                    family = [process, *process.parents()]
                    found |= {one.pid: one for one in family if one.pid == process.pid or "slurmstepd" in one.name()}
        return list(found.values())

    def lose_power(self, node: str) -> None:
        """Its daemon and all of its processes are gone at once."""
        pid = int((self.folder / f"slurmd.{node}.pid").read_text())
        for process in [psutil.Process(pid), *self.processes(node)]:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def boot(self, node: str) -> None:
        """Its daemon is started again."""
        self.run("slurmd", "-N", node)


def missing_programs() -> list[str]:
    """Programs of Slurm that this machine lacks (tests/system_packages installs them)."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    return [program for program in PROGRAMS if shutil.which(program, path=path) is None]


@contextmanager
def slurm(num_nodes: int) -> Iterator[Slurm]:
    """A Slurm with nodes n1, n2, … of 2 cores; ended, with all of its jobs, when the context ends."""
    folder = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))
    folder.chmod(0o755)
    environment = {
        **os.environ,
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
    }
    (folder / "slurm.conf").write_text(_conf(folder, num_nodes))
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    running = Slurm(folder, environment)
    try:
        paths = {"socket": "munge.sock", "pid-file": "munge.pid", "log-file": "munged.log", "seed-file": "munge.seed"}
        options = [f"--{name}={folder / file}" for name, file in paths.items()]
        running.run("munged", f"--key-file={key}", *options, "--force")
        running.run("slurmctld", "-c")
        for index in range(1, num_nodes + 1):
            (folder / f"spool.n{index}").mkdir()
            running.run("slurmd", "-N", f"n{index}")
        _wait_until_idle(running, num_nodes)
        yield running
    finally:
        with contextlib.suppress(AssertionError, subprocess.SubprocessError):
            running.run("scancel", "--user=root", "--full")
            deadline = time.monotonic() + 15.0
            while running.run("squeue", "-h") and time.monotonic() < deadline:
                time.sleep(0.2)
        _stop(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _conf(folder: Path, num_nodes: int) -> str:
    ports = sorted(_free_ports(1)) + _free_row(num_nodes)
    return CONF.format(
        folder=folder,
        host=socket.gethostname(),
        nodes=num_nodes,
        last=10 + num_nodes,
        control_port=ports[0],
        first_port=ports[1],
        last_port=ports[num_nodes],
    )


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [int(server.getsockname()[1]) for server in servers]


def _free_row(count: int) -> list[int]:
    """Ports that follow each other, as a range in slurm.conf wants them."""
    for first in range(17000 + os.getpid() % 1000, 30000, count):
        row = list(range(first, first + count))
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in row:
                stack.enter_context(socket.create_server(("", port)))
            return row
    raise AssertionError("no free ports")


def _wait_until_idle(running: Slurm, num_nodes: int) -> None:
    deadline = time.monotonic() + 30.0
    while running.run("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D") != str(num_nodes):
        assert time.monotonic() < deadline, running.log("slurmctld.log")[-2000:]
        time.sleep(0.1)


def _stop(folder: Path) -> None:
    pids = []
    for file in [*folder.glob("slurmd.*.pid"), folder / "slurmctld.pid", folder / "munge.pid"]:
        with contextlib.suppress(OSError, ValueError):
            pids.append(int(file.read_text()))
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 10.0
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
