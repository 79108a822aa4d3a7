"""`pretrain cluster up` and `down`: several nodes of Ray on this machine, or machines through Ray's launcher.

Without a config: one `ray start --block` per node, each in a session of its own, a fresh token in a file of mode
0600, everything in one folder of the user's. `down` ends exactly the processes that `up` wrote down (unlike
`ray stop`, which ends every Ray of the user). With a config: `ray up` and `ray down` of the rendered file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from launch.clusters.guard import users_of
from launch.clusters.render import render
from pretrain.config import RunConfig, load_config
from pretrain.errors import ExitCode, PretrainError, RunError, UserError

START_WITHIN_S = 180.0
LOOPBACK = "127.0.0.1"
_STATE, _TOKEN = "cluster.json", "token"
_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's least; no tensor goes through it


def run_up(args: argparse.Namespace) -> int:
    """Handler of `pretrain cluster up`."""
    if args.config is not None:
        return _through_launcher("up", load_config(args.config, args.overrides, check_files=False))
    if args.nodes < 1 or args.slots < 1:
        raise UserError(
            f"--nodes={args.nodes} and --slots={args.slots} make no cluster. Both are at least 1. Correct them."
        )
    folder = cluster_folder()
    if _alive(folder):
        raise RunError(f"a cluster is up already, in {folder}. One per user. End it with pretrain cluster down.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        port, jobs_port = _start(folder, args.nodes, args.slots)
    except BaseException:
        _end(folder)
        raise
    print(f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={shlex.quote(str(folder / _TOKEN))}")
    print(f"export RAY_API_SERVER_ADDRESS=http://{LOOPBACK}:{jobs_port} RAY_ADDRESS={LOOPBACK}:{port}")
    print(f"{args.nodes} nodes of {args.slots} slots are up, logs in {folder}", file=sys.stderr)
    print("next: pretrain submit CONFIG --address auto; at the end: pretrain cluster down", file=sys.stderr)
    return int(ExitCode.DONE)


def run_down(args: argparse.Namespace) -> int:
    """Handler of `pretrain cluster down`."""
    if args.config is not None:
        return _through_launcher("down", load_config(args.config, args.overrides, check_files=False))
    folder = cluster_folder()
    if not folder.exists():
        print("no cluster of `pretrain cluster up` is here")
        return int(ExitCode.DONE)
    print(f"ended {_end(folder)} processes")
    return int(ExitCode.DONE)


def cluster_folder() -> Path:
    """The folder of this user's cluster; short, because Ray puts sockets below it. Raises UserError."""
    folder = Path(tempfile.gettempdir()) / f"pretrain-cluster-{os.getuid()}"
    if folder.is_symlink() or (folder.exists() and folder.stat().st_uid != os.getuid()):
        raise UserError(f"{folder} belongs to somebody else. It must be yours alone. Set TMPDIR to a place of yours.")
    return folder


def _start(folder: Path, num_nodes: int, slots: int) -> tuple[int, int]:
    """Starts head and nodes; gives the ports of Ray and of the Jobs API."""
    (folder / _TOKEN).touch(mode=0o600)
    (folder / _TOKEN).write_text(secrets.token_hex(32))
    port, jobs_port = _free_port(), _free_port()
    own = ["--block", "--disable-usage-stats", f"--node-ip-address={LOOPBACK}", f"--num-cpus={slots}"]
    own += [f"--object-store-memory={_OBJECT_STORE_BYTES}", "--num-gpus=0"]
    head = ["--head", f"--port={port}", f"--temp-dir={folder}/r", f"--dashboard-host={LOOPBACK}"]
    head += [f"--dashboard-port={jobs_port}", "--include-dashboard=true", f"--ray-client-server-port={_free_port()}"]
    _spawn(folder, "head", [*own, *head, f"--dashboard-agent-listen-port={_free_port()}"])
    _wait(folder, lambda: _answers(port) and _answers(jobs_port), "its head does not answer")
    for index in range(1, num_nodes):
        options = [f"--address={LOOPBACK}:{port}", f"--dashboard-agent-listen-port={_free_port()}"]
        _spawn(folder, f"node-{index}", [*own, *options])
    logs = [folder / f"node-{index}.log" for index in range(1, num_nodes)]
    _wait(folder, lambda: all("Ray runtime started" in log.read_text() for log in logs), "a node does not come up")
    return port, jobs_port


def _spawn(folder: Path, name: str, options: list[str]) -> None:
    program = Path(sys.executable).with_name("ray")
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / _TOKEN),
        "RAY_TMPDIR": str(folder),
        "TMPDIR": str(folder),  # Ray's dashboard leaves folders in it (measured)
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": str(int(START_WITHIN_S)),
    }
    for variable in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN"):
        environment.pop(variable, None)
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [str(program), "start", *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            cwd="/",
        )
    state = _state(folder)
    state.append({"name": name, "pid": process.pid, "started": psutil.Process(process.pid).create_time()})
    (folder / _STATE).write_text(json.dumps(state))


def _wait(folder: Path, ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_WITHIN_S
    while not ready():
        alive = _alive(folder)
        if len(alive) < len(_state(folder)) or time.monotonic() > deadline:
            logs = "\n".join(f"{log.name}: {log.read_text()[-800:]}" for log in sorted(folder.glob("*.log")))
            raise PretrainError(f"the cluster could not be started: {what}. Its logs end so:\n{logs}")
        time.sleep(0.1)


def _end(folder: Path) -> int:
    """Ends the cluster's processes and removes its folder; how many there were."""
    found = {process.pid: process for process in _alive(folder)}
    for process in list(found.values()):
        with contextlib.suppress(psutil.Error):
            found |= {child.pid: child for child in process.children(recursive=True)}
    for process in _alive(folder):
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGTERM)
    _, left = psutil.wait_procs(list(found.values()), timeout=5.0)
    for pid in {process.pid for process in left} | {pid for pid in users_of(str(folder)) if _started_here(pid, folder)}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    psutil.wait_procs(left, timeout=5.0)
    shutil.rmtree(folder, ignore_errors=True)
    return len(found)


def _started_here(pid: int, folder: Path) -> bool:
    """Whether a process descends from the cluster's: who reads its logs, or is connected to it, is not its own."""
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        if process.name().startswith(("ray::", "ray-dashboard")):  # a new title overwrites the environment (measured)
            return True
        return process.environ().get("RAY_TMPDIR") == str(folder)
    return False


def _state(folder: Path) -> list[dict[str, object]]:
    with contextlib.suppress(OSError, ValueError):
        state: list[dict[str, object]] = json.loads((folder / _STATE).read_text())
        return state
    return []


def _alive(folder: Path) -> list[psutil.Process]:
    """Living `ray start` processes of the cluster; a number that another process has got since is none of them."""
    processes = []
    for entry in _state(folder):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(int(str(entry["pid"])))
            if process.create_time() == entry["started"] and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1.0):
        return True
    return False


def _through_launcher(action: str, config: RunConfig) -> int:
    """`ray up` or `ray down` of the rendered file; its exit code. Raises UserError."""
    text = render("ray", config)
    if action == "up":
        _make_token()
    with tempfile.TemporaryDirectory(prefix="pretrain-launcher-") as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(text)
        program = Path(sys.executable).with_name("ray")
        return subprocess.call([str(program), action, str(path), "--yes"])


def _make_token() -> None:
    """Ray's token file of this user, mode 0600, if there is none."""
    path = Path.home() / ".ray" / "auth_token"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(secrets.token_hex(32))
