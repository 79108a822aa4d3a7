"""A Ray for one run on this machine: started with it, gone with it.

Token mode with a fresh token, a short temporary folder of its own, no usage statistics, no dashboard, no
output. Two of them run side by side. Ray's processes die with this one by the kernel's parent-death
signal; `guard` ends those that linger and removes the folder. Should it be killed too, the next start or
`pretrain doctor` removes the folder.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from launch.clusters import guard
from pretrain.errors import PretrainError
from pretrain.rundir import ProcessIdentity, is_alive, this_process

PREFIX = "pretrain-ray-"
LOOPBACK = "127.0.0.1"
_OWNER = "owner.json"
_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's least; no tensor goes through it
_LONGEST_FOLDER = 42  # Ray's socket paths below it must stay under 108 bytes


@dataclass(slots=True)
class LocalRay:
    """What became of it; `died`: its control service ended before it was told to."""

    died: bool = False

    def leave(self, exit_code: int) -> None:
        """Ends this process at once if Ray died: its library crashes or waits for ever at a normal end (measured)."""
        if self.died:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_code)


@contextmanager
def local_ray(num_slots: int, device: str) -> Iterator[LocalRay]:
    """Ray with `num_slots` CPUs (or the machine's GPUs for device=cuda), as long as the context lasts.

    Once per process, on its main thread and before anything imports ray: Ray reads the token mode at its
    import, and the kernel ends Ray's processes with the thread that started them.

    Raises:
        PretrainError: Ray does not start here.
    """
    if "ray" in sys.modules:
        raise RuntimeError("ray was imported before local_ray could set its token mode")
    folder, state = _make_folder(), LocalRay()
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=secrets.token_hex(32),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        # A process that misses Ray's control service for a minute ends itself, this one with code 1 and no word
        # (measured). The run needs that service only to get slots: without it, it trains on.
        RAY_gcs_rpc_server_reconnect_timeout_s=str(30 * 86400),
        # Else Ray puts the host's address in the place of the loopback one, and everybody can knock at its doors.
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        RAY_worker_niceness="0",  # 15 otherwise, which the ranks would inherit from their agent
        RAY_raylet_start_wait_time_s="120",  # 30 s are too few on a machine that is busy with something else
    )
    os.environ.pop("RAY_ADDRESS", None)
    # A session of its own: what kills the terminal's processes must not kill the one that cleans up.
    command = [sys.executable, "-S", guard.__file__, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, cwd="/") as process:
        try:
            _start(folder, num_slots, device)
            yield state
        finally:
            state.died = not _stop(folder)
            process.communicate(b"done")


def _start(folder: Path, num_slots: int, device: str) -> None:
    import ray

    try:
        with _only_needed_processes():
            ray.init(
                address="local",
                num_cpus=num_slots,
                num_gpus=0 if device == "cpu" else None,
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                _temp_dir=str(folder / "r"),  # Ray opens its folder to everybody; the one above stays closed
                _node_ip_address=LOOPBACK,
                _system_config={"prestart_worker_first_driver": False},  # the only worker is the agent
            )
    except Exception as error:  # Ray raises many kinds
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise PretrainError(
            f"the local Ray could not be started: {reason[0]}. It needs free memory, /dev/shm and loopback ports. "
            "Look at pretrain doctor; python -m pretrain CONFIG trains without Ray."
        ) from error


@contextmanager
def _only_needed_processes() -> Iterator[None]:
    """No autoscaler monitor and no log monitor: a quarter of Ray's CPU time at start and 160 MB (measured).

    No dashboard either: Ray would still start its process, for usage statistics alone, and wait for its import; and
    its agent, which a node must have, without the parts that serve it. And a free port for that agent: of two Rays
    on one host the second tries the same fixed one for 3 s, and a cluster's head could take no jobs as long as a run
    of ours held it (both measured). Ray has these switches, but `ray.init` does not pass them on.
    """
    from ray._private import parameter, services, utils

    original, start_dashboard = parameter.RayParams, services.start_api_server
    what_dashboard_lacks = utils.get_dashboard_dependency_error
    parameter.RayParams = functools.partial(
        original, no_monitor=True, include_log_monitor=False, dashboard_agent_listen_port=0
    )
    services.start_api_server = lambda *words, **more: (None, None)  # what Ray gets from one that did not start
    utils.get_dashboard_dependency_error = lambda: "it is not wanted"
    try:
        yield
    finally:
        parameter.RayParams, services.start_api_server = original, start_dashboard
        utils.get_dashboard_dependency_error = what_dashboard_lacks


def _stop(folder: Path) -> bool:
    """Ends Ray and waits until its processes, which write into the folder, are gone; False if it had died before."""
    import ray

    mine = psutil.Process().children(recursive=True)
    started = [process for process in mine if not _is_guard(process)]
    lives = not ray.is_initialized() or any(_is_control_service(process) for process in started)
    if lives:
        ray.shutdown()
    _, left = psutil.wait_procs(started, timeout=5.0)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=5.0)
    shutil.rmtree(folder, ignore_errors=True)
    return lives


def _is_control_service(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.name().startswith("gcs_server") and process.status() != psutil.STATUS_ZOMBIE
    return False


def _is_guard(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return guard.__file__ in process.cmdline()
    return True  # it is gone already


def remove_leftovers() -> list[Path]:
    """Removes the folders of local Rays whose owners are gone; gives what was removed."""
    removed = []
    for base in {_base(), Path("/tmp")}:
        for folder in base.glob(f"{PREFIX}*"):
            owner = _owner_of(folder)
            if owner is not None and is_alive(owner) is False and folder.lstat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


def _make_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_base()))  # mode 0700
    (folder / _OWNER).write_text(json.dumps(this_process().to_json()))
    return folder


def _base() -> Path:
    base = Path(tempfile.gettempdir())
    return base if len(str(base)) + 1 + len(PREFIX) + 8 <= _LONGEST_FOLDER else Path("/tmp")


def _owner_of(folder: Path) -> ProcessIdentity | None:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return ProcessIdentity.from_json(json.loads((folder / _OWNER).read_text()))
    return None
