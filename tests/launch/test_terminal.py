"""Output whose reader goes away costs neither a run nor its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.errors import ExitCode

ROOT = Path(__file__).parents[2]
PRINTS = """
import sys
from launch.terminal import outlive_terminal
from pretrain.log import Log

with outlive_terminal():
    for number in range(3000):
        print("step", number, "of a run that goes on", flush=number % 2 == 0)
        Log(0).info("saved", step=number)
        print("error: a line that is no log", file=sys.stderr)
sys.exit(5)
"""


def _start(program: str, **streams: int) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, text=True, **streams)


def test_a_reader_that_goes_away_ends_nothing():
    process = _start(PRINTS, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith("step 0")
    process.stdout.close()
    process.stderr.close()
    assert process.wait(30) == ExitCode.INTERRUPTED


def test_a_full_disk_under_both_outputs_ends_nothing():
    with open("/dev/full", "w") as full:
        assert _start(PRINTS, stdout=full.fileno(), stderr=full.fileno()).wait(30) == ExitCode.INTERRUPTED


def test_what_can_be_printed_is_printed():
    output, errors = _start(PRINTS, stdout=subprocess.PIPE, stderr=subprocess.PIPE).communicate(timeout=30)
    assert len(output.splitlines()) == 3000
    assert len(errors.splitlines()) == 6000


@pytest.mark.parametrize("module", ["pretrain", "launch.cli"])
def test_the_exit_code_of_a_user_error_survives_a_full_disk_under_the_log(module):
    words = [sys.executable, "-m", module, *(["train"] if module == "launch.cli" else []), "/nowhere/config.yaml"]
    with open("/dev/full", "w") as full:
        code = subprocess.run(words, cwd=ROOT, stdout=full, stderr=full, env=os.environ, timeout=60, check=False)
    assert code.returncode == ExitCode.USER_ERROR
