"""A Ray of two nodes (two raylets, one CPU each) on this machine, until stdin ends.

`python -m tests.launch.two_nodes FOLDER` prints {"address", "dashboard"} as a JSON line when it is up.
The token comes from the environment. Lines on stdin change the newest node but the head: `kill` ends it by SIGKILL,
`add` starts another one, `drain SECONDS` tells Ray that it goes then; each is answered by a line `done`.
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
def two_nodes() -> Iterator[tuple[dict[str, str], psutil.Popen]]:
    """The JSON line of such a Ray, and its process; nothing of it is left afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder,
        psutil.Popen(
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
        started = nodes.children(recursive=True)
        yield json.loads(line), nodes
        started += nodes.children(recursive=True)
        nodes.stdin.close()
        nodes.wait(60.0)
        _, left = psutil.wait_procs(started, timeout=20.0)
        assert left == []


def drain(address: str, node: str, seconds: str) -> None:
    """What an autoscaler or a cloud's agent does with the notice that a machine will be taken away."""
    words = ["drain-node", f"--address={address}", f"--node-id={node}", "--reason=DRAIN_NODE_REASON_PREEMPTION"]
    words += ["--reason-message=the machine is taken back", f"--deadline-remaining-seconds={seconds}"]
    subprocess.run([Path(sys.executable).with_name("ray"), *words], stdout=sys.stderr, check=True)


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
            order, _, seconds = line.strip().partition(" ")
            if order == "kill":
                cluster.remove_node(second, allow_graceful=False)
            elif order == "add":
                second = cluster.add_node(**shared)
            elif order == "drain":
                drain(cluster.address, second.node_id, seconds)
            print("done", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
