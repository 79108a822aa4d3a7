"""What a run on this machine leaves lying around, shows and opens: nothing that it should not.

The run has a folder for temporary files and a /dev/shm of its own, so that whatever is in them is its own.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pretrain.rundir import RunDirectory
from tests.launch.planted import PLANTED, command_lines_with, files_with
from tests.launch.runs import ROOT, environment, write_config
from tests.launch.test_train import START_S, committed, ended, wait_for
from tests.missing import did_not_run

pytestmark = pytest.mark.timeout(600)


class Room:
    """A place for one run: its temporary files and, where that can be made, its /dev/shm."""

    def __init__(self, folder: Path) -> None:
        self.temporary = Path(tempfile.mkdtemp(prefix="h", dir="/tmp"))  # short: Ray's sockets lie below it
        self.shared = self.temporary / "shm"
        self.home = folder / "home"
        self.own_shared = os.getuid() == 0 and shutil.which("unshare") is not None

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "launch.cli", *words]
        if self.own_shared:
            self.shared.mkdir(exist_ok=True)
            mount = f'mount --bind {self.shared} /dev/shm && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", mount, "sh", *command]
        variables = {**environment(self.home), **PLANTED, "TMPDIR": str(self.temporary)}
        return subprocess.Popen(
            command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def left(self) -> list[str]:
        """Files of whatever kind that are there."""
        return [
            os.path.join(folder, name)
            for folder, folders, names in os.walk(self.temporary)
            for name in [*names, *folders]
            if os.path.join(folder, name) != str(self.shared)
        ]


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    room = Room(tmp_path)
    yield room
    shutil.rmtree(room.temporary)


def test_secrets_are_nowhere_doors_are_on_this_machine_alone_and_nothing_is_left(room: Room, tmp_path: Path) -> None:
    config = write_config(tmp_path, "run", fake={"steps": 5000, "step_s": 0.05})
    with ended(room.start("train", str(config))) as train:
        wait_for(lambda: (room.home / "run" / "run.yaml").exists() and committed(room.home, "run"), train)
        family = psutil.Process(train.pid).children(recursive=True)
        tokens = {process.environ().get("RAY_AUTH_TOKEN") for process in family} - {None}
        assert len(tokens) == 1
        (token,) = tokens
        assert token is not None
        assert len(token) == 64
        assert {process.environ().get("RAY_AUTH_MODE") for process in family} - {None} == {"token"}
        doors = {
            connection.laddr.ip.removeprefix("::ffff:")
            for process in [psutil.Process(train.pid), *family]
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert doors == {"127.0.0.1"}
        words = [*PLANTED.values(), token]
        assert command_lines_with(words) == []
        (ray_folder,) = room.temporary.glob("pretrain-ray-*")
        assert ray_folder.stat().st_mode & 0o777 == 0o700
        assert files_with(words, room.temporary) == []
        train.send_signal(signal.SIGTERM)  # as a scheduler does: to the command alone
        out, err = train.communicate(timeout=START_S)
    assert train.returncode == 5, err
    assert room.left() == []
    run = room.home / "run"
    assert run.stat().st_mode & 0o777 == 0o700
    assert files_with(words, run) == []
    assert not any(word in out + err for word in words)
    assert [process for process in family if process.is_running()] == []


def test_a_killed_run_leaves_no_process_port_shared_memory_or_file(room: Room, tmp_path: Path) -> None:
    config = write_config(tmp_path, "run", fake={"steps": 5000, "step_s": 0.05}, standbys=True)
    with ended(room.start("train", str(config))) as train:
        run = RunDirectory.locate(str(room.home / "run")) if (room.home / "run" / "run.yaml").exists() else None
        wait_for(lambda: (room.home / "run" / "run.yaml").exists() and committed(room.home, "run"), train)
        run = run or RunDirectory.locate(str(room.home / "run"))
        wait_for(lambda: any(event.kind == "standbys_ready" for event in run.events()), train)
        family = [psutil.Process(train.pid), *psutil.Process(train.pid).children(recursive=True)]
        ports = [
            connection.laddr.port
            for process in family
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert len(ports) >= 3  # hub, Ray's services
        logs = [path for path in room.temporary.rglob("*.out") if path.is_file()]
        reader = subprocess.Popen(["tail", "-f", *map(str, logs)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for(lambda: len(psutil.Process(reader.pid).open_files()) >= len(logs) > 0, train)
            train.kill()
            train.communicate()
            assert psutil.wait_procs(family, timeout=15.0)[1] == []
            wait_for(lambda: not room.left(), reader)  # the guard removes the folder after the last process
            assert reader.poll() is None, "who reads Ray's logs is ended with it"
        finally:
            reader.kill()
            reader.wait()
    for port in ports:
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", port))


def test_two_users_train_side_by_side_and_neither_touches_what_is_the_others() -> None:
    """Runs of one name, at one time, in one temporary folder: the second user is `nobody`, with a home of its own."""
    if os.getuid() != 0:
        did_not_run("only root can start processes of other users")
    nobody = pwd.getpwnam("nobody")
    top = Path(tempfile.mkdtemp(prefix="h", dir="/tmp"))
    top.chmod(0o755)
    started: list[subprocess.Popen[str]] = []
    try:
        for name, user in (("mine", pwd.getpwuid(0)), ("theirs", nobody)):
            folder = top / name
            folder.mkdir()
            config = write_config(folder, "run", fake={"steps": 100, "step_s": 0.05})
            for path in (folder, *folder.rglob("*")):
                os.chown(path, user.pw_uid, user.pw_gid)
            variables = {**environment(folder / "home"), "HOME": str(folder), "USER": user.pw_name}
            variables.pop("TMPDIR", None)
            # May read everything (the interpreter can lie in root's home), may change only what is its own.
            identity = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
            identity += ["--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]
            command = [*identity, sys.executable, "-m", "launch.cli", "train", str(config)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            started.append(subprocess.Popen(command, env=variables, cwd=ROOT, text=True, **pipes))
        ends = [process.communicate(timeout=2 * START_S) for process in started]
        assert [process.returncode for process in started] == [0, 0], ends
        assert all("completed at step 100" in out for out, _ in ends)
        assert {path.stat().st_uid for path in (top / "theirs" / "home" / "run").rglob("*")} == {nobody.pw_uid}
        assert (top / "theirs" / "home" / "run").stat().st_mode & 0o777 == 0o700
        left = [path for path in Path("/tmp").glob("pretrain-ray-*") if path.stat().st_uid == nobody.pw_uid]
        assert left == []
    finally:
        for process in started:
            process.kill()
            process.wait()
        shutil.rmtree(top)
