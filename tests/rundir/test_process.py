"""Who lives: by pid, start time and boot, against processes that really start, die and are killed."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pretrain.rundir import ProcessIdentity, identify_process, is_alive, this_process, wait_until_gone
from tests.rundir.helpers import ELSEWHERE, gone_process


def sleeper(*, group: bool = False) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"], start_new_session=group)


def test_this_process_lives_and_keeps_its_identity() -> None:
    assert is_alive(this_process()) is True
    assert this_process() == this_process()
    assert ProcessIdentity.from_json({**this_process().to_json(), "rank": 3}) == this_process()
    assert str(this_process()).startswith(f"pid {os.getpid()} on ")


def test_a_killed_process_is_dead_at_once_even_before_its_parent_looks() -> None:
    process = sleeper()
    identity = identify_process(process.pid)
    assert is_alive(identity) is True
    process.kill()
    deadline = time.monotonic() + 5
    while is_alive(identity) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert is_alive(identity) is False  # a zombie still: nobody has waited for it
    assert Path(f"/proc/{process.pid}").exists()
    process.wait(timeout=5)
    assert is_alive(identity) is False
    with pytest.raises(ProcessLookupError):
        identify_process(process.pid)


def test_a_reused_pid_is_another_process() -> None:
    earlier = dataclasses.replace(this_process(), start_time=this_process().start_time - 100)
    assert is_alive(earlier) is False


def test_what_cannot_be_seen_from_here_is_unknown() -> None:
    assert is_alive(ELSEWHERE) is None
    boot, _, namespace = this_process().boot_id.partition("/")
    assert namespace
    assert is_alive(dataclasses.replace(this_process(), boot_id=f"{boot}/pid:[1]")) is None  # another container


def test_a_process_name_with_parentheses_and_spaces_is_read_right(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(program), "60"])
    try:
        ours, theirs = this_process().start_time, identify_process(process.pid).start_time
        assert 0 <= theirs - ours < 3600 * os.sysconf("SC_CLK_TCK")
        assert is_alive(identify_process(process.pid)) is True
    finally:
        process.kill()
        process.wait(timeout=5)


def test_waiting_ends_as_soon_as_all_are_gone() -> None:
    process = subprocess.Popen(["sleep", "0.2"])
    started = time.monotonic()
    assert wait_until_gone([identify_process(process.pid), gone_process(), ELSEWHERE, this_process()]) == []
    assert time.monotonic() - started < 5
    process.wait(timeout=5)


def test_what_is_left_after_the_wait_is_killed_with_the_group_that_it_leads() -> None:
    script = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    leader = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    alone = sleeper()
    assert leader.stdout is not None
    child = identify_process(int(leader.stdout.readline()))
    victims = [identify_process(leader.pid), identify_process(alone.pid)]
    assert wait_until_gone(victims, timeout_s=0.1) == victims
    assert leader.wait(timeout=5) == alone.wait(timeout=5) == -signal.SIGKILL
    assert wait_until_gone([child], timeout_s=5.0) == []
    leader.stdout.close()


def test_a_process_that_reuses_a_pid_is_never_killed() -> None:
    process = sleeper(group=True)
    earlier = dataclasses.replace(identify_process(process.pid), start_time=1.0)
    try:
        assert wait_until_gone([earlier], timeout_s=0.1) == []
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(timeout=5)
