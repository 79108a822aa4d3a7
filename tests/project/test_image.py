"""The container file: clean for hadolint, not root, and its context holds what it copies."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("hadolint")
    return subprocess.run([str(program), "--no-color", str(path)], capture_output=True, text=True, timeout=60)


def test_the_dockerfile_is_clean_for_hadolint() -> None:
    result = hadolint(DOCKERFILE)
    assert result.returncode == 0, result.stdout


def test_hadolint_would_find_a_mistake(tmp_path: Path) -> None:
    broken = tmp_path / "Dockerfile"
    broken.write_text(DOCKERFILE.read_text().replace("USER 10001", "USER root"))
    assert hadolint(broken).returncode != 0


def test_the_image_does_not_run_as_root() -> None:
    users = re.findall(r"^USER (\S+)", DOCKERFILE.read_text(), re.MULTILINE)
    assert users == ["10001"]


def test_everything_the_dockerfile_copies_is_in_the_build_context() -> None:
    text = DOCKERFILE.read_text()
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = set()
    for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        words = [word for word in line.split() if not word.startswith("--")]
        if "--from=build" not in line:
            copied |= set(words[:-1])
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)


def test_both_devices_are_targets_on_the_same_parts() -> None:
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert stages == [("${BASE}", "build"), ("${BASE}", "common"), ("common", "cuda"), ("common", "cpu")]
    for device in ("cpu", "cuda"):
        made = subprocess.run(
            ["make", "-n", "--no-print-directory", "image",
             f"DEVICE={device}", "BUILDER=build-it", "BASE=local/base:1"],
            cwd=ROOT, capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
        words = made.stdout.split()
        assert words[:2] == ["build-it", "build"]
        assert words[words.index("--target") + 1] == device
        assert "BASE=local/base:1" in words


def test_the_base_is_pinned() -> None:
    (base,) = re.findall(r"^ARG BASE=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base)


def test_what_builds_the_package_is_pinned() -> None:
    """pip makes an environment for it that no file of constraints reaches."""
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert [re.fullmatch(r"\w+==[\d.]+", word) is not None for word in requires] == [True]


def test_scripts_of_the_image_are_clean_for_shellcheck() -> None:
    program = Path(sys.executable).with_name("shellcheck")
    scripts = [str(ROOT / "docker" / name) for name in ("entrypoint", "healthy")]
    result = subprocess.run([str(program), *scripts], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout


def start(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the entry point where `ray` and `pretrain` only say how they were called."""
    for name in ("ray", "pretrain"):
        program = folder / name
        program.write_text(f'#!/bin/sh\necho {name} "$@"\n')
        program.chmod(0o755)
    path = f"{folder}:/usr/bin:/bin"
    return subprocess.run(
        ["bash", str(ROOT / "docker" / "entrypoint"), *words],
        env={"PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=20,
    )


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        (["head"], {"SLOTS": "0"}, "ray start --head --block --port=6379 --dashboard-host=0.0.0.0 .*--num-cpus=0"),
        (["head"], {"DS_ACCELERATOR": "cuda", "SLOTS": "8"}, "ray start .*--num-gpus=8"),
        (["job", "a.yaml", "seed=1"], {"HEAD": "h"}, "pretrain submit a.yaml seed=1 --address http://h:8265 .*--wait"),
        (["train", "a.yaml"], {}, "pretrain train a.yaml"),
        ([], {}, "pretrain --help"),
    ],
)
def test_the_entry_point_starts_what_it_is_told_to(
    words: list[str], environment: dict[str, str], expected: str, tmp_path: Path
) -> None:
    result = start(tmp_path, *words, RAY_AUTH_TOKEN="x", **environment)
    assert result.returncode == 0, result.stderr
    assert re.match(expected, result.stdout)
    assert "x" not in result.stdout.split()


@pytest.mark.parametrize(
    ("words", "environment", "text"),
    [
        (["head"], {}, "RAY_AUTH_TOKEN is missing"),
        (["worker", "h"], {"RAY_AUTH_TOKEN_PATH": "/nowhere/token"}, "RAY_AUTH_TOKEN is missing"),
        (["worker"], {"RAY_AUTH_TOKEN": "x"}, "worker needs the name"),
        (["job"], {"RAY_AUTH_TOKEN": "x"}, "job needs a config"),
        (["head"], {"RAY_AUTH_TOKEN": "x", "SLOTS": "two"}, "SLOTS=two is not a number"),
    ],
)
def test_the_entry_point_refuses_what_cannot_work(
    words: list[str], environment: dict[str, str], text: str, tmp_path: Path
) -> None:
    result = start(tmp_path, *words, **environment)
    assert result.returncode == 2
    assert text in result.stderr


def test_a_worker_says_whom_it_waits_for_and_does_not_wait_for_ever(tmp_path: Path) -> None:
    started = time.monotonic()
    result = start(tmp_path, "worker", "127.0.0.9", RAY_AUTH_TOKEN="x", HEAD_WITHIN_S="2")
    assert time.monotonic() - started < 15.0
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "waiting for the head: 127.0.0.9 does not answer on port 6379 yet",
        "error: head 127.0.0.9 does not answer on port 6379 within 2 s. Look at its log.",
    ]


def check_compose(path: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("check-jsonschema")
    words = [str(program), "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [("", ""), ("condition: service_healthy", "condition: healthy"), ("shm_size: 1gb", "shm_sise: 1gb")],
)
def test_the_compose_file_passes_the_schema_of_compose_which_would_find_a_mistake(
    text: str, wrong: str, tmp_path: Path
) -> None:
    (tmp_path / "compose.yaml").write_text((ROOT / "docker" / "compose.yaml").read_text().replace(text, wrong))
    result = check_compose(tmp_path / "compose.yaml")
    assert (result.returncode == 0) == (not wrong), result.stdout


def test_the_compose_file_makes_two_nodes_with_a_token_that_is_no_variable() -> None:
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    services = compose["services"]
    assert set(services) == {"head", "worker", "job"}
    assert services["head"]["command"] == ["head"]
    assert services["worker"]["command"] == ["worker", "head"]
    assert services["worker"]["depends_on"] == {"head": {"condition": "service_healthy"}}
    assert services["head"]["ports"] == ["127.0.0.1:8265:8265"]  # nobody else sees it
    for service in services.values():
        assert service["secrets"] == ["ray_token"]
        assert "RAY_AUTH_TOKEN" not in service["environment"]
        assert service["environment"]["RAY_AUTH_TOKEN_PATH"] == "/run/secrets/ray_token"
    assert compose["secrets"] == {"ray_token": {"environment": "RAY_AUTH_TOKEN"}}
