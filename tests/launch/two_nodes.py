"""A Ray of two nodes (two raylets, one CPU each) on this machine, until stdin ends.

`python -m tests.launch.two_nodes FOLDER` prints {"address", "dashboard"} as a JSON line when it is up.
The token comes from the environment. A line `kill` ends the second node by SIGKILL.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


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
