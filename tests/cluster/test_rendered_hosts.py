"""A head's and a worker's commands of rendered files, each on a host of its own, as the tools start them.

The launcher's file as `ray up` and `ray exec` do, SkyPilot's task on its first and second node, the RayCluster with
the `ray start` that KubeRay's operator makes of `rayStartParams`. The run needs one rank on each host, so it ends only
if the worker is one of the cluster. Slow: each starts two nodes of Ray. Heads alone: tests/launch/test_entry_commands.
"""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
from typing import Any

import pytest
import yaml

from pretrain.rundir import RunDirectory
from tests.cluster.machines import READY_S, Machines
from tests.launch.entered import STEPS, config_for, rendered, sent_to_the_head
from tests.launch.rendered import IMAGE
from tests.launch.runs import run_cli

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HEAD, WORKER, ELSEWHERE = 1, 2, 3


def check_completed(machines: Machines) -> None:
    """The run is complete, in one attempt with a rank on each of two hosts and its controller on the head, which no
    kind of cluster puts on a machine that may be taken away."""
    runs = machines.folder / "runs"
    assert (runs / "entered" / "fake.step").read_text() == str(STEPS), machines.logs()
    status = json.loads(run_cli(runs, "status", "entered", "--json").stdout)
    assert status["state"] == "completed"
    events = RunDirectory.locate(str(runs / "entered")).events()
    (started,) = [event.fields for event in events if event.kind == "ranks_started"]
    assert len({entry["host"] for entry in started["processes"]}) == 2
    assert [event.fields["host"] for event in events if event.kind == "attempt_started"] == [f"node{HEAD}"]


def test_the_commands_of_a_launcher_file_make_one_cluster_of_head_and_worker(machines: Machines) -> None:
    folder, hosts = machines.folder, machines.hosts
    launcher = {"kind": "hosts", "head": hosts.address(HEAD), "workers": [hosts.address(WORKER)], "user": "root"}
    text = rendered(folder, "ray", config_for(folder, ranks=1, launcher=launcher))
    body = yaml.safe_load(text)
    sent = sent_to_the_head(text)
    token = secrets.token_hex(32)
    for host in (HEAD, WORKER):
        (machines.home(host) / ".ray" / "auth_token").write_text(token)  # file_mounts
        (machines.home(host) / "ray_bootstrap_config.yaml").write_text(text)
    up = folder / "up"
    wait = "for i in $(seq 600); do pretrain status entered | grep -q completed && break; sleep 0.5; done; ray stop -f"
    head = [*body["setup_commands"], *body["head_setup_commands"], *body["head_start_ray_commands"]]
    script = [*(f"bash -c {shlex.quote(command)} || exit 7" for command in head), f"touch {up}"]
    script += [f"bash -c {shlex.quote(sent)} || exit 8", wait]
    first = machines.start(HEAD, "\n".join(script), PRETRAIN_HOME=str(folder / "runs"))
    machines.await_path(up, first)
    there = f"export RAY_HEAD_IP={hosts.address(HEAD)}; "  # as the launcher puts before each command of a worker
    commands = [*body["setup_commands"], *(there + command for command in body["worker_start_ray_commands"])]
    script = [*(f"bash -c {shlex.quote(command)} || exit 7" for command in commands), "sleep infinity"]
    second = machines.start(WORKER, "\n".join(script))
    assert machines.wait(first, 300.0) == 0, machines.logs()
    assert second.poll() is None
    check_completed(machines)
    assert token not in machines.logs()


def test_both_nodes_of_a_skypilot_task_end_well_when_the_run_does(machines: Machines) -> None:
    folder, hosts = machines.folder, machines.hosts
    config = config_for(folder, ranks=1, nodes={"home": "/runs"}, skypilot={"bucket": "s3://mine"})
    task = yaml.safe_load(rendered(folder, "skypilot", config))
    assert task["num_nodes"] == 2
    (folder / "runs").mkdir()
    # What SkyPilot does before: the bucket at its place. /mnt exists everywhere, /runs only in the file.
    (folder / "run.sh").write_text(task["run"].replace("/runs", "/mnt"))
    token = secrets.token_hex(32)
    addresses = f"{hosts.address(HEAD)}\n{hosts.address(WORKER)}"
    both = [
        machines.start(
            host, "exec bash run.sh", mounts=f"mount --bind {folder}/runs /mnt", SKYPILOT_NODE_RANK=str(rank),
            SKYPILOT_NODE_IPS=addresses, RAY_AUTH_TOKEN=token,
        )
        for rank, host in enumerate((HEAD, WORKER))
    ]  # fmt: skip
    # SkyPilot calls a task failed as soon as one node's script fails.
    assert [machines.wait(process, 300.0) for process in both] == [0, 0], machines.logs()
    check_completed(machines)


def test_a_raycluster_takes_a_run_that_is_sent_from_elsewhere(machines: Machines) -> None:
    folder, hosts = machines.folder, machines.hosts
    kubernetes = {"volumes": {"shared": {"claim": "shared", "mount": str(folder)}}}
    config = config_for(folder, ranks=1, nodes={"image": IMAGE}, kubernetes=kubernetes)
    documents = yaml.safe_load_all(rendered(folder, "kuberay", config, "--cluster"))
    (spec,) = [document["spec"] for document in documents if document["kind"] == "RayCluster"]
    (workers,) = spec["workerGroupSpecs"]
    assert (spec["authOptions"], workers["replicas"]) == ({"mode": "token"}, 2)
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # the operator's, from its secret
    address = f"{hosts.address(HEAD)}:6379"

    def pod(group: dict[str, Any], host: int, before: str, *words: str) -> subprocess.Popen[bytes]:
        options = [f"--{name}={value}" for name, value in group["rayStartParams"].items()]
        start = shlex.join(["ray", "start", *words, *options, "--block", "--metrics-export-port=8080"])
        (container,) = group["template"]["spec"]["containers"]
        environment = {item["name"]: item["value"] for item in container["env"]}
        return machines.start(host, f"{before}\n{start}", **environment, **token)

    pod(spec["headGroupSpec"], HEAD, ":", "--head")
    # The operator's init container waits like this.
    ready = f"until ray health-check --address {address} > /dev/null 2>&1; do sleep 1; done"
    for host in (WORKER, ELSEWHERE):
        pod(workers, host, ready, f"--address={address}")
    door = f"http://{hosts.address(HEAD)}:8265"
    submit = f"exec pretrain submit {config} --address {door} --resume auto --wait"
    opened = f"until (exec 3<> /dev/tcp/{hosts.address(HEAD)}/8265) 2> /dev/null; do sleep 1; done"
    sent = machines.start(ELSEWHERE, f"{opened}\n{submit}", PRETRAIN_HOME=str(folder / "runs"), **token)
    assert machines.wait(sent, READY_S + 120.0) == 0, machines.logs()
    check_completed(machines)
