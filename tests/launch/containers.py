"""Images and containers for tests: buildah builds, podman runs; both without a daemon, as root on Debian.

A base image of the distribution is made once per machine (`localhost/pretrain-base`); pip inside of the build sees
what pip outside sees: its certificate and its local package folders are mounted, and nothing of that stays.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.launch.runs import ROOT

PROGRAMS = ("buildah", "podman", "runc", "mmdebstrap")
BASE = "localhost/pretrain-base:debian"

# podman wants limits and scores set that a container host without CAP_SYS_RESOURCE cannot set; runc without them runs.
_RUNTIME = """\
#!{python}
import json, os, sys
words = sys.argv[1:]


def value_of(*names, otherwise=None):
    for index, word in enumerate(words):
        if word in names:
            return words[index + 1]
        for name in names:
            if word.startswith(name + "="):
                return word.split("=", 1)[1]
    return otherwise


def spare(process):
    for key in ("rlimits", "oomScoreAdj"):
        process.pop(key, None)
    for kind, names in (process.get("capabilities") or {{}}).items():
        process["capabilities"][kind] = [name for name in names if name != "CAP_SYS_RESOURCE"]


path = None
if "create" in words or "run" in words:
    path = os.path.join(value_of("--bundle", "-b", otherwise="."), "config.json")
elif "exec" in words:
    path = value_of("--process", "-p")
if path:
    with open(path) as stream:
        config = json.load(stream)
    spare(config.get("process", config))
    with open(path, "w") as stream:
        json.dump(config, stream)
os.execv("{runc}", ["runc", *words])
"""


def missing_programs() -> list[str]:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    return [program for program in PROGRAMS if shutil.which(program, path=path) is None]


def run(*words: str, timeout_s: float = 600.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command to its end; its output is in the failure."""
    full = {**os.environ, "BUILDAH_ISOLATION": "chroot", **environment}
    done = subprocess.run(words, cwd=ROOT, env=full, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, (
        f"{' '.join(words)} ended with {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    )
    return done


def build_image(target: str = "cpu") -> str:
    """The image of this tree for a device; gives its name. Layers that did not change are from the last build."""
    image = f"localhost/pretrain-test:{target}"
    if subprocess.run(["buildah", "inspect", "--type", "image", BASE], capture_output=True).returncode:
        _make_base()
    with tempfile.TemporaryDirectory() as folder:
        mounts = _pip_mounts(Path(folder))
        words = ["build", "--layers", "--format", "docker", "-f", "docker/Dockerfile", "--target", target]
        run("buildah", *words, "--build-arg", f"BASE={BASE}", *mounts, "-t", image, ".", timeout_s=1500.0)
    return image


def _make_base() -> None:
    release = re.search(r"^VERSION_CODENAME=(\w+)$", Path("/etc/os-release").read_text(), re.MULTILINE)
    assert release
    with tempfile.TemporaryDirectory() as folder:
        tar = str(Path(folder) / "base.tar")
        run("mmdebstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates", release[1], tar)
        container = run("buildah", "from", "scratch").stdout.strip()
        run("buildah", "add", container, tar, "/")
        run("buildah", "commit", "--rm", container, BASE)


def _pip_mounts(folder: Path) -> list[str]:
    """Options that let pip in the build see the certificate and local folders that pip sees here."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    values = dict(re.findall(r"^(?:global\.|:env:\.)([\w-]+)='(.*)'$", listed.stdout, re.MULTILINE))
    kept = {key: values[key] for key in ("cert", "find-links", "extra-index-url", "index-url") if key in values}
    kept = {key: value.replace("\\n", " ") for key, value in kept.items()}
    (folder / "pip.conf").write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in kept.items()))
    words = [word for value in kept.values() for word in value.split()]
    # A local index points to files that may lie beside it.
    paths = {os.path.dirname(word.removeprefix("file://")) if word.startswith("file://") else word for word in words}
    mounts = [f"{path}:{path}:ro" for path in sorted(paths) if path.startswith("/") and os.path.exists(path)]
    return [word for mount in [f"{folder}/pip.conf:/etc/pip.conf:ro", *mounts] for word in ("-v", mount)]


class Podman:
    """podman with a runtime that needs no CAP_SYS_RESOURCE."""

    def __init__(self, folder: Path) -> None:
        runc = shutil.which("runc", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        self._runtime = folder / "runtime"
        self._runtime.write_text(_RUNTIME.format(python=sys.executable, runc=runc))
        self._runtime.chmod(0o755)

    def __call__(self, *words: str, timeout_s: float = 120.0) -> str:
        return run("podman", "--runtime", str(self._runtime), *words, timeout_s=timeout_s).stdout.strip()

    def address(self, container: str, network: str) -> str:
        (info,) = json.loads(self("inspect", container))
        return str(info["NetworkSettings"]["Networks"][network]["IPAddress"])


def service_options(service: Mapping[str, object], *, token: Path, volumes: Mapping[str, Path]) -> list[str]:
    """A service of docker/compose.yaml as options of `podman run`: what the file says, named volumes as folders."""
    environment = service["environment"]
    assert isinstance(environment, dict)
    options = [f"--shm-size={service['shm_size']}"]
    options += [word for name, value in environment.items() for word in ("-e", f"{name}={value}")]
    options += ["-v", f"{token}:/run/secrets/ray_token:ro"]
    mounts = service["volumes"]
    assert isinstance(mounts, list)
    for mount in mounts:
        for name, path in volumes.items():
            if str(mount).startswith((f"{name}:", f"${{{name}")):
                options += ["-v", f"{path}:{str(mount).split('}')[-1].split(':', 1)[1]}"]
    return options
