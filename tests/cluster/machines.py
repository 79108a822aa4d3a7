"""Scripts on `Hosts`, each as a machine of its own: process table, /dev/shm, folder of Ray and home are its own.

What is started here sees this file system otherwise, and is gone with `close`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts
from tests.launch.runs import RANK_COMMAND, ROOT

READY_S = 240.0  # of a head on busy cores


class Machines:
    """See the module."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self._running: list[subprocess.Popen[bytes]] = []
        (hosts.folder / "ray").mkdir(exist_ok=True)

    def home(self, host: int) -> Path:
        path = self.folder / f"home-{host}"
        (path / ".ray").mkdir(parents=True, exist_ok=True)
        return path

    def start(self, host: int, script: str, *, mounts: str = ":", **environment: str) -> subprocess.Popen[bytes]:
        ray = self.hosts.folder / "ray"
        full = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.home(host)),
            "RAY_TMPDIR": str(ray),
            "TMPDIR": str(ray),
            "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300",
            "PRETRAIN_RANK_COMMAND": json.dumps(RANK_COMMAND),
            **environment,
        }
        more = f"mount -t tmpfs -o mode=1777 tmpfs {ray}\n{mounts}"
        apart = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-c", script]
        with self.log(host).open("ab") as log:
            process = subprocess.Popen(
                [*self.hosts.inside(host, more), *apart], env=full, cwd=self.folder, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._running.append(process)
        return process

    def log(self, host: int) -> Path:
        return self.folder / f"host-{host}.log"

    def logs(self) -> str:
        paths = sorted(self.folder.glob("host-*.log"))
        return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-3000:]}" for path in paths)

    def wait(self, process: subprocess.Popen[bytes], timeout_s: float) -> int:
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout_s} s:\n{self.logs()}")

    def close(self) -> None:
        for host in range(1, self.hosts.count + 1):
            self.hosts.kill_processes(host)
        for process in self._running:
            process.wait(10.0)

    def await_path(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        """Until the file is there; the process that makes it must live."""
        deadline = time.monotonic() + READY_S
        while not path.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{path.name} never came:\n{self.logs()}")
            time.sleep(0.2)
