"""docker/compose.yaml's services without their image: head, worker and job by the real entry point and health check.

Each service is a host with its own network, process table and /dev/shm; the ranks are fake. The image itself, built
and run, is in tests/launch/test_containers (slow).
"""

from __future__ import annotations

import secrets
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pretrain.rundir import RunDirectory
from tests.cluster.machines import READY_S, Machines
from tests.launch.entered import STEPS
from tests.launch.runs import ROOT, write_config

pytestmark = pytest.mark.timeout(400)
HEAD, WORKER = 1, 2


def program(machines: Machines, name: str, host: int) -> Path:
    """One of docker/'s programs; the role of a container lies in its own /tmp, which these hosts share."""
    path = machines.folder / f"{name}-{host}"
    path.write_text((ROOT / "docker" / name).read_text().replace("/tmp/role", str(machines.folder / f"role-{host}")))
    path.chmod(0o755)
    return path


def service(machines: Machines, host: int, body: dict[str, Any], token: Path, *, head: str) -> subprocess.Popen[bytes]:
    """Starts a service; `well-N` comes once its health check passes, `ill-N` once it fails after `break` is there."""
    folder, healthy = machines.folder, program(machines, "healthy", host)
    # Compose resolves the name of a service.
    words = [head if word == "head" and index else word for index, word in enumerate(body["command"])]
    script = f"""
{program(machines, "entrypoint", host)} {" ".join(words)} &
until [ -s {folder}/role-{host} ] && {healthy}; do sleep 0.3; done
touch {folder}/well-{host}
until [ -e {folder}/break ]; do sleep 0.3; done
kill -9 $(grep -lsx -e gcs_server -e raylet /proc/[0-9]*/comm | tr -dc '0-9\\n')
while {healthy}; do sleep 0.3; done
touch {folder}/ill-{host}
wait
"""
    environment = {**body["environment"], "RAY_AUTH_TOKEN_PATH": str(token), "RAY_AUTH_MODE": "token"}
    return machines.start(host, script, **environment)


def test_head_worker_and_job_of_the_compose_file_train_a_run_and_their_health_is_that_of_their_ray(
    machines: Machines,
) -> None:
    folder = machines.folder
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    head = machines.hosts.address(HEAD)
    nodes = {host: service(machines, host, services[name], token, head=head) for host, name in
             ((HEAD, "head"), (WORKER, "worker"))}  # fmt: skip
    for host, node in nodes.items():
        machines.await_path(folder / f"well-{host}", node)
    config = write_config(folder, "entered", fake={"steps": STEPS, "step_s": 0.05}, num_ranks=2)
    job = services["job"]
    environment = {**job["environment"], "HEAD": head, "RAY_AUTH_TOKEN_PATH": str(token), "RAY_AUTH_MODE": "token"}
    assert job["entrypoint"] == ["entrypoint", "job"]
    words = f"exec {program(machines, 'entrypoint', 3)} job {config}"
    sent = machines.start(3, words, PRETRAIN_HOME=str(folder / "runs"), **environment)
    assert machines.wait(sent, READY_S) == 0, machines.logs()
    assert (folder / "runs" / "entered" / "fake.step").read_text() == str(STEPS)
    events = RunDirectory.locate(str(folder / "runs" / "entered")).events()
    (started,) = [event.fields for event in events if event.kind == "ranks_started"]
    assert {entry["host"] for entry in started["processes"]} == {"node1", "node2"}
    (folder / "break").touch()
    for host, node in nodes.items():
        machines.await_path(folder / f"ill-{host}", node)
        machines.wait(node, 60.0)
    assert token.read_text() not in machines.logs()


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        ("head", {}, "RAY_AUTH_TOKEN is missing"),
        ("worker head", {}, "RAY_AUTH_TOKEN is missing"),
        ("worker", {"RAY_AUTH_TOKEN": "t"}, "worker needs the name or address of the head"),
        ("head", {"RAY_AUTH_TOKEN": "t", "SLOTS": "two"}, "SLOTS=two is not a number"),
        ("job", {"RAY_AUTH_TOKEN": "t"}, "job needs a config"),
        ("job run.yaml", {}, "RAY_AUTH_TOKEN is missing"),
    ],
)
def test_a_role_that_cannot_be_taken_is_one_line(words: str, environment: dict[str, str], message: str) -> None:
    command = ["bash", str(ROOT / "docker" / "entrypoint"), *words.split()]
    done = subprocess.run(command, env={"PATH": "/usr/bin:/bin", **environment}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
