"""The CPU image, really built, trains; two containers of docker/compose.yaml on a bridge are one cluster.

Slow: the build takes minutes. Needs buildah, podman, runc and mmdebstrap (tests/system_packages), and root.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from pretrain.rundir import RunDirectory
from tests.launch.containers import Podman, build_image, missing_programs, run, service_options
from tests.launch.runs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
USER = 10001
NETWORK = "pretrain-test"


@pytest.fixture(scope="module")
def image() -> str:
    missing = missing_programs()
    assert missing == [], f"{missing} are missing: tests/system_packages installs them where this is root on Debian"
    return build_image()


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """`DATA` with text and a config, `runs`, both of the image's user."""
    data, runs = tmp_path / "data", tmp_path / "runs"
    shutil.copytree(ROOT / "docs", data / "text", ignore=shutil.ignore_patterns("pictures"))
    runs.mkdir()
    body = yaml.safe_load((ROOT / "configs/tests/tiny-decoder.yaml").read_text())
    body |= {"tokenizer": "/runs/tokenizer.json", "data": {"lanes": 4, "sources": {"text": {"path": "/runs/text"}}}}
    (data / "run.yaml").write_text(yaml.safe_dump(body))
    tmp_path.chmod(0o755)
    subprocess.run(["chown", "-R", str(USER), str(data), str(runs)], check=True)
    return {"DATA": data, "runs": runs}


@pytest.fixture
def podman(tmp_path: Path) -> Iterator[Podman]:
    command = Podman(tmp_path)
    yield command
    for name in ("head", "worker", "job"):
        subprocess.run(["podman", "rm", "-f", "-t", "1", f"{NETWORK}-{name}"], capture_output=True)
    subprocess.run(["podman", "network", "rm", "-f", NETWORK], capture_output=True)


def test_the_image_is_small_and_holds_nothing_of_the_machine_that_built_it(image: str, podman: Podman) -> None:
    (info,) = json.loads(run("podman", "inspect", image).stdout)
    assert info["Size"] < 2.2e9
    assert info["Config"]["User"] == str(USER)
    assert info["Config"]["Entrypoint"] == ["entrypoint"]
    assert info["Healthcheck"]["Test"] == ["CMD", "healthy"]
    names = {word.split("=", 1)[0] for word in info["Config"]["Env"]}
    assert names == {"PATH", "PRETRAIN_HOME", "RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED", "PYTHONUNBUFFERED",
                     "DS_ACCELERATOR"}  # fmt: skip
    # Where packages came from, and with which certificate, is the builder's affair.
    inside = ["run", "--rm", "--network=none", "--entrypoint", "bash", image, "-c"]
    assert podman(*inside, "python -m pip config list 2>&1; env | grep -i -E '^(pip|uv|ssl|requests)_'; true") == ""
    assert podman(*inside, "find / -xdev -name pip.conf -size +0 2> /dev/null; true") == ""
    here = f"grep -rlF {os.path.realpath(ROOT)} /home/pretrain /usr/local /etc /opt/pretrain/bin 2> /dev/null; true"
    assert podman(*inside, here) == ""


def test_the_image_for_gpus_is_the_same_but_for_its_device(image: str) -> None:
    (cpu,), (cuda,) = (json.loads(run("podman", "inspect", name).stdout) for name in (image, build_image("cuda")))
    assert cuda["RootFS"] == cpu["RootFS"]
    changed = set(cuda["Config"]["Env"]) ^ set(cpu["Config"]["Env"])
    assert changed == {"DS_ACCELERATOR=cpu", "DS_ACCELERATOR=cuda", "NVIDIA_VISIBLE_DEVICES=all",
                       "NVIDIA_DRIVER_CAPABILITIES=compute,utility"}  # fmt: skip


def test_tokenizer_shards_and_training_run_in_the_image(image: str, folders: dict[str, Path], podman: Podman) -> None:
    mounts = [
        "-v",
        f"{folders['DATA']}:/data:ro",
        "-v",
        f"{folders['runs']}:/runs",
        "--shm-size=300m",
        "--network=none",
    ]
    prepare(podman, image, mounts)
    output = podman("run", "--rm", *mounts, image, "train", "/data/run.yaml", timeout_s=300.0)
    assert "completed at step 8" in output
    assert "step 8/8" in output
    doctor = podman("run", "--rm", *mounts, image, "checkpoint", "verify", "tiny-decoder")
    assert "step-00000008" in doctor
    assert (folders["runs"] / "tiny-decoder").stat().st_uid == USER
    # The quickstart's model and batch as the image brings them, for three steps.
    words = [
        "tokenizer=/runs/tokenizer.json", "data.sources.python.path=/runs/text",
        "data.validation.python.path=/runs/text", "eval.every_steps=none",
        "schedule.total_steps=3", "schedule.warmup_steps=1", "schedule.decay_steps=1",
    ]  # fmt: skip
    output = podman("run", "--rm", *mounts, image, "train", "configs/quickstart.yaml", *words, timeout_s=300.0)
    assert "completed at step 3" in output


def prepare(podman: Podman, image: str, mounts: list[str]) -> None:
    """Tokenizer and shards, made in the image."""
    words = ["tokenizer", "train", "/data/text", "--vocabulary-size", "300", "--out", "/runs/tokenizer.json"]
    podman("run", "--rm", *mounts, image, *words)
    words = ["data", "build", "/data/text", "--tokenizer", "/runs/tokenizer.json", "--out", "/runs/text"]
    podman("run", "--rm", *mounts, image, *words)


def test_two_containers_on_a_bridge_train_as_one_cluster(
    image: str, folders: dict[str, Path], podman: Podman, tmp_path: Path
) -> None:
    """Head, worker and job as docker/compose.yaml describes them; each node holds one of the two ranks."""
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o444)
    prepare(podman, image, ["-v", f"{folders['DATA']}:/data:ro", "-v", f"{folders['runs']}:/runs", "--network=none"])
    podman("network", "create", NETWORK)

    def options(name: str) -> list[str]:
        found = service_options(services[name], token=token, volumes=folders)
        return ["--name", f"{NETWORK}-{name}", "--network", NETWORK, "--memory", "4g", *found]

    podman("run", "-d", *options("head"), image, *services["head"]["command"])
    address = podman.address(f"{NETWORK}-head", NETWORK)
    host = ["--add-host", f"head:{address}"]  # compose resolves service names, this network does not
    podman("run", "-d", *options("worker"), *host, image, *services["worker"]["command"])
    wait_until_ready(address)
    job = podman("run", *options("job"), *host, image, "job", "/data/run.yaml", timeout_s=300.0)
    assert "completed at step 8" in job
    events = RunDirectory.locate(str(folders["runs"] / "tiny-decoder")).events()
    (started,) = [event.fields for event in events if event.kind == "ranks_started"]
    assert sorted(process["rank"] for process in started["processes"]) == [0, 1]
    assert len({process["host"] for process in started["processes"]}) == 2
    for name in ("head", "worker"):
        podman("exec", f"{NETWORK}-{name}", "healthy")  # or it would end with another code than 0
    for name, program in (("head", "gcs_server"), ("worker", "raylet")):
        kill = f"for p in $(grep -lx {program} /proc/[0-9]*/comm); do kill -9 ${{p//[^0-9]/}}; done"
        podman("exec", f"{NETWORK}-{name}", "bash", "-c", kill)
        wait_until(lambda name=name: is_ill(podman, f"{NETWORK}-{name}"))
    logs = podman("logs", f"{NETWORK}-head") + job
    assert token.read_text() not in logs


def is_ill(podman: Podman, container: str) -> bool:
    """Whether its health check fails, or it has ended itself."""
    try:
        podman("exec", container, "healthy")
    except AssertionError:
        return True
    return False


def wait_until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not what():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.5)


def wait_until_ready(address: str) -> None:
    """Until the Jobs API answers; an unauthenticated request counts as an answer."""
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((address, 8265), timeout=2.0):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError("the head does not answer")
