"""`pretrain doctor --address` on two hosts of which one is not fit: it is named, with what is wrong, and no other.

Slow: it starts two nodes of Ray.
"""

from __future__ import annotations

import json
import secrets

import pytest

from launch.doctor_machine import LEAST_FILES
from tests.cluster.machines import READY_S, Machines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HEAD, WORKER = 1, 2


def test_the_node_with_few_files_and_another_run_directory_is_named(machines: Machines) -> None:
    folder, hosts = machines.folder, machines.hosts
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    home, up, joined = folder / "runs", folder / "up", folder / "joined"
    home.mkdir()
    address = f"{hosts.address(HEAD)}:6379"
    ray = "ray start --disable-usage-stats --object-store-memory=80000000 --num-cpus=1"
    doctor = f"until test -e {joined}; do sleep 0.5; done; pretrain doctor --address auto --json > {folder}/found"
    script = f"{ray} --head --port=6379 --include-dashboard=false || exit 7\ntouch {up}\n{doctor}"
    first = machines.start(HEAD, script, PRETRAIN_HOME=str(home), **token)
    machines.await_path(up, first)
    join = f"ulimit -n {LEAST_FILES - 1}; {ray} --address={address} && touch {joined}; sleep infinity"
    machines.start(WORKER, join, mounts=f"mount -t tmpfs tmpfs {home}", PRETRAIN_HOME=str(home), **token)
    assert machines.wait(first, READY_S) == 3, machines.logs()
    findings = json.loads((folder / "found").read_text())
    bad = [finding for finding in findings if finding["verdict"] == "bad"]
    assert all(finding["check"].startswith(hosts.address(WORKER)) for finding in bad), findings
    named = {finding["check"].split(") ", 1)[1] for finding in bad}
    assert named == {"file limit", "run directory"}, findings
