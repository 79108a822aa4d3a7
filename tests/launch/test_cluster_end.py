"""`pretrain cluster down` beside processes that only look into the cluster's folder. No Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from launch.clusters import up

WAIT = """
import ctypes, sys, time
ctypes.CDLL(None).prctl(15, sys.argv[2].encode())  # PR_SET_NAME
stream = open(sys.argv[1])
print("open", flush=True)
time.sleep(100)
"""


def opened(log: Path, title: str, **variables: str) -> subprocess.Popen[str]:
    """A process of a group of its own with a file of the folder open."""
    command = [sys.executable, "-c", WAIT, str(log), title]
    environment = {**os.environ, **variables}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


def test_down_ends_what_the_cluster_left_and_nobody_who_reads_its_logs(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    log = folder / "head.log"
    log.write_text("a line\n")
    with (
        opened(log, "reader") as reader,
        opened(log, "gcs_server", RAY_TMPDIR=str(folder)) as service,
        opened(log, "ray::Agent") as renamed,  # its title has taken the place of its environment
    ):
        try:
            assert up._end(folder) == 0
            assert service.wait(10.0) == renamed.wait(10.0) == -9
            assert psutil.Process(reader.pid).is_running()
            assert reader.poll() is None
            assert not folder.exists()
        finally:
            for process in (reader, service, renamed):
                process.kill()
