"""What a rendered file tells a machine to run is run as written, in namespaces of its own: mounts, processes, net.

So `ray stop` of one file, its fixed ports and its `/etc/pretrain` meet nothing of this machine. The ranks are fake.
Each starts a Ray, so two are slow. Slurm's script runs in test_slurm, the containers' entry points in
tests/cluster/test_container_roles and, in their image, in test_containers.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.hosts import missing
from tests.launch.entered import STEPS, config_for, rendered, sent_to_the_head
from tests.launch.rendered import IMAGE
from tests.launch.runs import RANK_COMMAND, ROOT, run_cli
from tests.missing import did_not_run

pytestmark = pytest.mark.timeout(600)


def in_namespaces(folder: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script as a machine of its own: it sees this file system, but its changes of /etc are private."""
    lacking = missing()
    if lacking:
        did_not_run(lacking)
    home = folder / "home"
    home.mkdir(exist_ok=True)
    prepare = (
        "ip link set lo up; mkdir -p /tmp/.ns; mount -t tmpfs none /tmp/.ns; mkdir /tmp/.ns/{up,work}; "
        "mount -t overlay none -o lowerdir=/etc,upperdir=/tmp/.ns/up,workdir=/tmp/.ns/work /etc\n"
    )
    full = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(home),
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300",
        "PRETRAIN_RANK_COMMAND": json.dumps(RANK_COMMAND),
        **environment,
    }
    words = ["unshare", "--mount", "--pid", "--net", "--fork", "--mount-proc", "--kill-child", "bash", "-c"]
    return subprocess.run([*words, prepare + script], env=full, cwd=folder, capture_output=True, text=True, timeout=500)


def check_completed(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert (folder / "runs" / "entered" / "fake.step").read_text() == str(STEPS)
    status = run_cli(folder / "runs", "status", "entered", "--json")
    assert json.loads(status.stdout)["state"] == "completed"


@pytest.mark.slow
def test_the_entry_point_of_a_rayjob_is_a_ray_job_that_ends_with_the_run(tmp_path: Path) -> None:
    """As KubeRay's submitter does: `ray job submit -- ENTRYPOINT` on a cluster with the ConfigMap at its place."""
    kubernetes = {"volumes": {"shared": {"claim": "shared", "mount": str(tmp_path)}}}
    text = rendered(tmp_path, "kuberay", config_for(tmp_path, ranks=2, nodes={"image": IMAGE}, kubernetes=kubernetes))
    documents = {document["kind"]: document for document in yaml.safe_load_all(text)}
    (tmp_path / "mounted.yaml").write_text(documents["ConfigMap"]["data"]["run.yaml"])
    job = documents["RayJob"]["spec"]
    (mount,) = [m for m in _container(job)["volumeMounts"] if m["name"] == "config"]
    environment = {item["name"]: item["value"] for item in _container(job)["env"]}
    script = f"""
mkdir -p {mount["mountPath"]} && cp mounted.yaml {mount["mountPath"]}/run.yaml || exit 9
exported=$(pretrain cluster up --nodes 1 --slots 2) || exit 8
eval "$exported"
ray job submit --address "$RAY_API_SERVER_ADDRESS" -- {shlex.join(shlex.split(job["entrypoint"]))}
code=$?
pretrain cluster down
exit $code
"""
    done = in_namespaces(tmp_path, script, **environment)
    check_completed(tmp_path, done)
    assert f"completed at step {STEPS}" in done.stdout


def _container(job: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    return container


@pytest.mark.slow
def test_the_commands_of_a_launcher_file_bring_up_a_head_that_takes_the_run(tmp_path: Path) -> None:
    launcher = {"kind": "hosts", "head": "127.0.0.1", "workers": [], "user": "root"}
    text = rendered(tmp_path, "ray", config_for(tmp_path, ranks=2, launcher=launcher))
    body = yaml.safe_load(text)
    sent = sent_to_the_head(text)
    home = tmp_path / "home"
    (home / ".ray").mkdir(parents=True)
    (home / ".ray" / "auth_token").write_text(secrets.token_hex(32))
    (home / "ray_bootstrap_config.yaml").write_text(text)
    commands = [*body["setup_commands"], *body["head_setup_commands"], *body["head_start_ray_commands"], sent]
    wait = "for i in $(seq 600); do pretrain status entered | grep -q completed && break; sleep 0.5; done; ray stop -f"
    script = "\n".join([*(f"bash -c {shlex.quote(command)} || exit 7" for command in commands), wait])
    check_completed(tmp_path, in_namespaces(tmp_path, script, PRETRAIN_HOME=str(tmp_path / "runs")))
    assert (home / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600


def test_the_run_of_a_skypilot_task_ends_with_the_run_on_its_first_node(tmp_path: Path) -> None:
    skypilot = {"bucket": "s3://mine"}
    config = config_for(tmp_path, ranks=2, nodes={"home": "/runs"}, skypilot=skypilot)
    task = yaml.safe_load(rendered(tmp_path, "skypilot", config))
    assert task["num_nodes"] == 1
    (tmp_path / "runs").mkdir()
    # What SkyPilot does before: the bucket at its place. /mnt exists everywhere, /runs only in the file.
    (tmp_path / "run.sh").write_text(task["run"].replace("/runs", "/mnt"))
    script = f"mount --bind {tmp_path}/runs /mnt && bash run.sh"
    environment = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "127.0.0.1", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    done = in_namespaces(tmp_path, script, **environment)
    check_completed(tmp_path, done)
