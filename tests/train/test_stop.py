"""Where a wish to stop comes from, and which one wins."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pretrain.errors import ExitCode
from pretrain.log import Log
from pretrain.train.stop import StopFlag, StopReason

ROOT = Path(__file__).parents[2]


@pytest.fixture
def flag():
    flag = StopFlag(Log(stream=io.StringIO()))
    yield flag
    flag.close()


def _wait_for(flag: StopFlag, reason: StopReason) -> None:
    deadline = time.monotonic() + 5
    while flag.reason is not reason:
        assert time.monotonic() < deadline, f"still {flag.reason!r}"
        time.sleep(0.01)


def test_a_stronger_wish_wins_and_a_weaker_one_changes_nothing(flag):
    assert flag.reason is StopReason.NONE
    flag.ask(StopReason.INTERRUPT, "a")
    assert flag.reason is StopReason.INTERRUPT
    flag.ask(StopReason.STOP, "b")
    flag.ask(StopReason.INTERRUPT, "c")
    assert flag.reason is StopReason.STOP


@pytest.mark.parametrize(("word", "reason"), [("stop", StopReason.STOP), ("drain", StopReason.INTERRUPT)])
def test_a_word_on_the_lifeline_raises_the_flag(flag, word, reason):
    read_end, write_end = os.pipe()
    flag.watch_lifeline(read_end)
    os.write(write_end, f"{word}\n".encode())
    _wait_for(flag, reason)
    flag.close()
    os.close(write_end)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_to_save_and_go(flag, number):
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        flag.watch_signals()
        os.kill(os.getpid(), number)
        _wait_for(flag, StopReason.INTERRUPT)
    finally:
        for restored, handler in before.items():
            signal.signal(restored, handler)


def test_a_signal_in_the_middle_of_a_line_writes_nothing_and_the_loop_tells_it_later(tmp_path):
    # A handler that writes to the stream that is being written to raises "reentrant call", and ends the run.
    program = (
        "import os, signal, sys\n"
        "from pretrain.log import Log\n"
        "from pretrain.train.stop import StopFlag\n"
        "class Stream:\n"
        "    busy = False\n"
        "    def write(self, text):\n"
        "        assert not self.busy, 'reentrant'\n"
        "        self.busy = True\n"
        "        if text.startswith('line'): os.kill(os.getpid(), signal.SIGTERM)\n"
        "        sys.stdout.write(text)\n"
        "        self.busy = False\n"
        "        return len(text)\n"
        "    def flush(self): pass\n"
        "stream = Stream()\n"
        "flag = StopFlag(Log(stream=stream))\n"
        "flag.watch_signals()\n"
        "stream.write('line\\n')\n"
        "print(flag.reason.name, flag.reason.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "line"
    assert lines[1].endswith("asked to end after this step reason=interrupt source=SIGTERM")
    assert lines[2:] == ["INTERRUPT INTERRUPT"]


def test_the_time_limit_interrupts_and_says_so(flag):
    began = time.monotonic()
    flag.watch_clock(0.3)
    assert flag.reason is StopReason.NONE
    _wait_for(flag, StopReason.INTERRUPT)
    assert 0.3 <= time.monotonic() - began < 2
    assert "source=cluster.time_limit_s=0.3" in flag._log._stream.getvalue()


def test_a_control_request_stops_the_run_although_an_earlier_look_failed(flag):
    answers = [OSError("network away"), [], ["stop"]]

    def pending():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    flag.watch_requests(pending)
    _wait_for(flag, StopReason.STOP)
    assert answers == []


def test_a_rank_whose_agent_is_gone_ends_at_once_with_code_7():
    program = (
        "import os, sys, time\n"
        "from pretrain.log import Log\n"
        "from pretrain.train.stop import StopFlag\n"
        "StopFlag(Log(3)).watch_lifeline(int(sys.argv[1]))\n"
        "time.sleep(60)\n"
    )
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(read_end)],
        pass_fds=[read_end],
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    os.close(read_end)
    os.close(write_end)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == ExitCode.FENCED
    assert "r3 ERROR the agent is gone" in errors
