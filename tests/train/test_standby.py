"""A standby process: quiet until its order comes, then a rank with all that the order holds."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.agents.process import Child
from pretrain.errors import ExitCode

ROOT = Path(__file__).parents[2]

PROGRAM = """
import os, sys, threading, time
from pretrain.train.standby import stand_by
from pretrain.train.watch import Heartbeat

def part(name, go=os.devnull):
    def work():
        while not os.path.exists(go):
            time.sleep(0.01)
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        print(name, threading.current_thread().name, nice, flush=True)
    return work

heartbeat = Heartbeat(int(os.environ["PRETRAIN_HEARTBEAT_FD"]))
parts = [part("first", os.environ["GO"]), part("second")]
arguments = stand_by(int(os.environ["PRETRAIN_LIFELINE_FD"]), heartbeat, parts)
print("rank", *arguments, os.environ["OWN"], os.environ.get("PRETRAIN_MASTER_FD"), flush=True)
part("after")()
print("to stderr", file=sys.stderr, flush=True)
with os.fdopen(int(os.environ["PRETRAIN_LIFELINE_FD"])) as words:
    print("word", words.readline().strip(), flush=True)
"""


class Started:
    def __init__(self, folder: Path) -> None:
        self.before, self.log, self.go = folder / "before", folder / "log", folder / "go"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "GO": str(self.go)}
        with self.before.open("wb") as output:
            self.child = Child([sys.executable, "-c", PROGRAM], environment, output)

    def get_ready(self) -> None:
        self.go.touch()
        self.wait_for("ready")

    def order(self, *more: int) -> None:
        with self.log.open("ab") as log:
            message = {"arguments": ["--run", "there"], "environment": {"OWN": "mine"}}
            self.child.hand_over(message, [log.fileno(), *more])

    def wait_for(self, word: str) -> None:
        deadline = time.monotonic() + 20
        while not any(line["standby"] == word for line in self.child.read_heartbeats()):
            assert time.monotonic() < deadline, self.before.read_text()
            time.sleep(0.01)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[type[Started]]:
    started: list[Started] = []

    def make() -> Started:
        started.append(Started(tmp_path))
        return started[-1]

    yield make  # type: ignore[misc]
    for one in started:
        one.child.reap()


def test_an_order_gives_arguments_environment_output_and_port_and_later_words_are_heard(start) -> None:
    standby = start()
    standby.get_ready()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        standby.order(listener.fileno())
    standby.wait_for("taken")
    standby.child.say("stop")
    code = os.waitid(os.P_PID, standby.child.pid, os.WEXITED | os.WNOWAIT)
    assert code.si_status == 0
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    assert standby.before.read_text() == "first imports 19\nsecond imports 19\n"
    first, after, error, word = standby.log.read_text().splitlines()
    assert first.split()[:4] == ["rank", "--run", "there", "mine"]
    assert int(first.split()[4]) > 2
    assert after == f"after MainThread {nice}"  # the rank itself was never at low priority
    assert error == "to stderr"
    assert word == "word stop"


def test_an_order_in_the_middle_of_the_imports_is_answered_and_the_rest_is_done_at_full_speed(start) -> None:
    standby = start()
    standby.order()
    standby.child.say("stop")
    standby.wait_for("taken")  # its first part waits for a file that is not there
    standby.go.touch()
    os.waitid(os.P_PID, standby.child.pid, os.WEXITED | os.WNOWAIT)
    lines = standby.log.read_text().splitlines()
    assert lines[0].startswith("first imports")
    assert lines[1] == f"second MainThread {os.getpriority(os.PRIO_PROCESS, 0)}"
    assert lines[2].startswith("rank --run there mine")


def test_a_standby_whose_agent_is_gone_ends_at_once_with_code_7(start) -> None:
    standby = start()
    standby.get_ready()
    closed_t = time.monotonic()
    standby.child._lifeline.close()
    ended = os.waitid(os.P_PID, standby.child.pid, os.WEXITED | os.WNOWAIT)
    assert ended.si_status == ExitCode.FENCED
    assert time.monotonic() - closed_t < 5.0  # a few milliseconds on two idle cores


def test_a_standby_without_an_agent_is_refused() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pretrain", "--standby"], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert result.returncode == ExitCode.USER_ERROR
    assert "PRETRAIN_HEARTBEAT_FD='' is not a file descriptor" in result.stderr


def test_a_ready_standby_has_imported_all_that_a_step_of_training_needs() -> None:
    """Of a whole run in one process, what was imported after the standby's parts: nothing heavy."""
    program = (
        "import json, sys\n"
        "from pretrain.train.standby import imports_of_a_rank\n"
        "for part in imports_of_a_rank(): part()\n"
        "import torch\n"
        "print(json.dumps([torch.cuda.is_initialized(), sorted(sys.modules)]))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    touched_device, modules = json.loads(result.stdout)
    assert touched_device is False
    assert {"deepspeed.runtime.zero.stage3", "torch._dynamo", "pretrain.train.loop", "tokenizers"} <= set(modules)
