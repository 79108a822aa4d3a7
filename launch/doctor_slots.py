"""`pretrain doctor --slots N`: an all-reduce and a matrix product on each slot of this machine, before a run does them.

Takes a number of slots → one finding that names those that compute wrong, are slow or never answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.doctor_machine import Finding
from launch.slot_probe import expected_sum

PROBE_COMMAND = (sys.executable, "-m", "launch.slot_probe")
SLOW_FACTOR = 1.6  # times the median of all slots
WITHIN_S = 120.0


def check_slots(
    count: int, device: str = "cpu", commands: Sequence[Sequence[str]] | None = None, within_s: float = WITHIN_S
) -> list[Finding]:
    """Runs the probe in `count` processes; `commands` replaces the probe of each (tests)."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    commands = commands or [PROBE_COMMAND] * count
    with tempfile.TemporaryDirectory(prefix="pretrain-doctor-") as folder:
        outputs = [Path(folder, str(rank)) for rank in range(count)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, command in enumerate(commands):
                processes.append(_start(command, rank, count, port, device, outputs[rank]))
            failed = _await_all(processes, time.monotonic() + within_s)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        if failed is not None:
            code, said = processes[failed].returncode, _last_line(outputs[failed].with_suffix(".err"))
            found = f"the probe of slot {failed} ended with {code}: {said or 'without a word'}"
            return [Finding("slots", "bad", found, "mend this first: the other slots were not judged")]
        return judge({f"slot {rank}": _result(output) for rank, output in enumerate(outputs)})


def _await_all(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> int | None:
    """The first that failed, whose error explains the silence of those that wait for it; None if none did."""
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if failed:
            return failed[0]
        time.sleep(0.05)
    return next((rank for rank, process in enumerate(processes) if process.poll()), None)


def _result(output: Path) -> dict[str, Any] | None:
    """What a probe measured, None where it has not said it."""
    with contextlib.suppress(ValueError):
        result = json.loads(_last_line(output))
        return result if isinstance(result, dict) else None
    return None


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


def _start(
    command: Sequence[str], rank: int, size: int, port: int, device: str, output: Path
) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PROBE_DEVICE": device,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    if device == "cuda":
        # The index is one of the devices that are visible here: others are not ours to compute on.
        visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
        environment["CUDA_VISIBLE_DEVICES"] = (visible[rank] if rank < len(visible) else "") if visible else str(rank)
    with output.open("wb") as out, output.with_suffix(".err").open("wb") as err:
        return subprocess.Popen(list(command), env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err)


def judge(results: dict[str, dict[str, Any] | None]) -> list[Finding]:
    """Which slots are wrong, silent or slow. PURE.

    Args:
        results: by the slot's name, what its probe measured; None where it did not answer.
    """
    size = len(results)
    answered = {name: result for name, result in results.items() if result is not None}
    silent = [name for name in results if name not in answered]
    product, total = expected_sum(), size * (size + 1) // 2
    wrong = [name for name, result in answered.items() if result["product"] != product]
    unreduced = [name for name, result in answered.items() if result["reduced"] != [total]]
    findings = []
    if wrong:
        found = f"{', '.join(wrong)}: a product of whole numbers came out wrong"
        findings.append(Finding("matmul", "bad", found, "take that device out: it computes wrong"))
    if silent and not (wrong or unreduced):
        found = f"{', '.join(silent)} did not answer within the time"
        findings.append(Finding("all-reduce", "bad", found, "look at its device, its network and its log"))
    if unreduced:
        found = f"{', '.join(unreduced)}: the sum over all slots came out wrong"
        findings.append(Finding("all-reduce", "bad", found, "a link or a device of these slots is broken"))
    findings += _slow(answered)
    if not findings:
        matmul = statistics.median(result["matmul_s"] for result in answered.values())
        reduce_s = max(result["all_reduce_s"] for result in answered.values())
        found = f"{size} slots agree: product {1e3 * matmul:.1f} ms, all-reduce of 1 MB {1e3 * reduce_s:.1f} ms"
        findings.append(Finding("slots", "ok", found))
    return findings


def _slow(answered: dict[str, dict[str, Any]]) -> list[Finding]:
    if len(answered) < 2:
        return []
    # Not the mean: one slow slot must not hide itself. Of two the faster one is what a slot can do.
    typical = statistics.median_low([result["matmul_s"] for result in answered.values()])
    slow = {
        name: result["matmul_s"] / typical
        for name, result in answered.items()
        if result["matmul_s"] > SLOW_FACTOR * typical
    }
    if not slow:
        return []
    found = ", ".join(f"{name} takes {factor:.1f} times as long" for name, factor in slow.items())
    return [Finding("matmul", "note", found, "all ranks wait for it: other work, heat, or a throttled device")]
