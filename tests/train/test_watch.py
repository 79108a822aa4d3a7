"""Heartbeats never stall the loop; the watchdog ends a rank that is stuck."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from pretrain.errors import ExitCode
from pretrain.train.watch import Heartbeat

ROOT = Path(__file__).parents[2]


def test_phases_and_events_arrive_as_json_lines():
    read_end, write_end = os.pipe()
    heartbeat = Heartbeat(write_end)
    heartbeat.phase("data", 7)
    heartbeat.phase("step", 7, collective=True)
    heartbeat.event("committed", step=7, checkpoint="step-00000007-a001")
    os.close(write_end)
    with os.fdopen(read_end) as lines:
        first, second, third = (json.loads(line) for line in lines)
    assert (first["phase"], first["step"], first["collective"]) == ("data", 7, 0)
    assert (second["phase"], second["step"], second["collective"]) == ("step", 7, 1)
    assert (third["event"], third["checkpoint"]) == ("committed", "step-00000007-a001")


def test_a_full_or_closed_pipe_drops_beats_and_never_stalls():
    read_end, write_end = os.pipe()
    heartbeat = Heartbeat(write_end)
    started = time.monotonic()
    for step in range(5000):  # far more than the 64 KiB that a pipe holds
        heartbeat.phase("step", step)
    os.close(read_end)
    heartbeat.phase("step", 5000)
    assert time.monotonic() - started < 5
    assert heartbeat.step == 5000
    os.close(write_end)


def test_a_phase_that_lasts_too_long_ends_the_rank_and_names_it():
    program = (
        "import time\n"
        "from pretrain.log import Log\n"
        "from pretrain.train.watch import Heartbeat, Watchdog\n"
        "heartbeat = Heartbeat()\n"
        "Watchdog(heartbeat, limit_s=0.4, start_limit_s=60, log=Log(0))\n"
        "heartbeat.phase('compile', 0)\n"
        "time.sleep(0.8)\n"
        "for step in range(5):\n"
        "    heartbeat.phase('step', step)\n"
        "    time.sleep(0.2)\n"
        "print('alive', flush=True)\n"
        "heartbeat.phase('data', 5)\n"
        "time.sleep(60)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, cwd=ROOT)
    assert result.returncode == ExitCode.FAILED
    assert result.stdout == "alive\n"
    assert "phase took too long phase=data step=5" in result.stderr
    assert "time.sleep" in result.stderr or "<string>" in result.stderr  # the stack that is stuck
