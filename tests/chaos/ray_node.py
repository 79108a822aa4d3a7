"""A Ray of one node with two CPUs until stdin ends: `python -m tests.chaos.ray_node FOLDER` prints {"dashboard"}."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.launch.two_nodes import free_port


def main() -> None:
    os.environ["RAY_TMPDIR"] = sys.argv[1]
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")  # a busy machine
    os.environ.setdefault("RAY_worker_niceness", "0")  # else the jobs' supervisors get no time there
    Path(sys.argv[1], "ray").mkdir(parents=True, exist_ok=True)
    from ray.cluster_utils import Cluster

    port = free_port()
    head = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": True, "dashboard_port": port,
            "dashboard_agent_listen_port": free_port()}  # fmt: skip
    cluster = Cluster(initialize_head=True, connect=False, head_node_args=head)
    try:
        print(json.dumps({"dashboard": f"http://127.0.0.1:{port}"}), flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
