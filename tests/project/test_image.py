"""The container file: clean for hadolint, not root, and its context holds what it copies."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(("device", "code"), [("cpu", 0), ("cuda", 0), ("tpu", 2)])
def test_the_device_argument_knows_cpu_and_cuda_and_refuses_others(device: str, code: int) -> None:
    check = re.search(r"^RUN (case .*? esac)", DOCKERFILE.read_text(), re.MULTILINE)
    assert check
    done = subprocess.run(["bash", "-c", check[1]], env={"DEVICE": device}, capture_output=True, text=True)
    assert done.returncode == code
    assert (f"DEVICE={device} is unknown" in done.stderr) == (code == 2)
