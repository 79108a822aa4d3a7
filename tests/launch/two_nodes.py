"""A Ray of two nodes (two raylets, one CPU each) on this machine, until stdin ends.

`python -m tests.launch.two_nodes FOLDER` prints {"address", "dashboard"} as a JSON line when it is up.
The token comes from the environment. A line `kill` ends the second node by SIGKILL.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def two_nodes() -> Iterator[tuple[dict[str, str], psutil.Process]]:
    """The JSON line of such a Ray, and its process; nothing of it is left afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder,
        subprocess.Popen(
            [sys.executable, "-m", "tests.launch.two_nodes", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=Path(__file__).resolve().parents[2],
            text=True,
        ) as nodes,
    ):
        assert nodes.stdin is not None
        assert nodes.stdout is not None
        line = nodes.stdout.readline()
        assert line, nodes.communicate()
        process = psutil.Process(nodes.pid)
        started = process.children(recursive=True)
        yield json.loads(line), process
        started += process.children(recursive=True)
        nodes.stdin.close()
        nodes.wait(60.0)
        _, left = psutil.wait_procs(started, timeout=20.0)
        assert left == []


def main() -> None:
    os.environ["RAY_TMPDIR"] = sys.argv[1]  # also the file that names the current cluster, which `auto` reads
    Path(sys.argv[1], "ray").mkdir(parents=True)
    os.environ.update(RAY_raylet_start_wait_time_s="120")  # 30 s are too few on a busy machine
    from ray.cluster_utils import Cluster

    port = free_port()
    shared = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    head = {**shared, "include_dashboard": True, "dashboard_port": port, "dashboard_agent_listen_port": free_port()}
    cluster = Cluster(initialize_head=True, connect=False, head_node_args=head)
    try:
        second = cluster.add_node(**shared)
        cluster.wait_for_nodes()
        print(json.dumps({"address": cluster.address, "dashboard": f"http://127.0.0.1:{port}"}), flush=True)
        for line in sys.stdin:
            if line.strip() == "kill":
                cluster.remove_node(second, allow_graceful=False)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
