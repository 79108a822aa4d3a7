"""`pretrain doctor`: checks with a case that makes each of them fail, and what a sound machine gives."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from launch import doctor, doctor_machine
from launch.cli import main
from launch.doctor import check_devices, check_disks
from launch.doctor_cluster import compare_nodes, why
from launch.doctor_machine import (
    Finding,
    check_clock,
    check_compiler,
    check_file_limits,
    check_home,
    check_interface,
    check_names,
    check_packages,
    interfaces,
)
from launch.doctor_slots import PROBE_COMMAND, check_slots, judge
from launch.slot_probe import WIDTH, expected_sum
from tests.launch.runs import ROOT
from tests.missing import did_not_run

SOUND = {"product": expected_sum(), "matmul_s": 0.001, "all_reduce_s": 0.002}


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_packages_in_the_versions_that_are_required_are_fine_and_others_are_not() -> None:
    assert {finding.verdict for finding in check_packages()} == {"ok"}
    found = check_packages(["numpy>=99", "no-such-package>=1", "pydantic>=2", 'x>=1; sys_platform == "plan9"'])
    assert [(finding.check, finding.verdict) for finding in found] == [
        ("numpy", "bad"),
        ("no-such-package", "bad"),
        ("pydantic", "ok"),
    ]
    assert found[0].remedy == "install numpy>=99"


def test_a_missing_compiler_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    finding = only(check_compiler())
    assert finding.verdict == "note"
    assert finding.found == "g++, ninja not found"


@pytest.mark.parametrize(("limit", "verdict"), [(512, "bad"), (2048, "note")])
def test_a_low_limit_of_open_files_is_found(limit: int, verdict: str) -> None:
    program = "from launch.doctor_machine import check_file_limits as c; f = c()[0]; print(f.verdict, f.remedy)"
    command = f"ulimit -Sn {limit}; exec {sys.executable} -c '{program}'"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.stdout.startswith(f"{verdict} ulimit -n"), done.stderr
    assert only(check_file_limits()).check == "file limit"


@pytest.mark.parametrize(("size", "verdict"), [("50m", "note"), ("300m", "ok")])
def test_little_shared_memory_is_noted(size: str, verdict: str) -> None:
    if os.getuid() != 0 or shutil.which("unshare") is None:
        did_not_run("only root can mount a small /dev/shm")
    program = (
        "from launch.doctor_machine import check_shared_memory as c; f = c()[0]; print(f.verdict, f.found, f.remedy)"
    )
    script = f"mount -t tmpfs -o size={size} none /dev/shm && exec {sys.executable} -c '{program}'"
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.stdout.startswith(f"{verdict} "), done.stderr
    assert ("--shm-size" in done.stdout) == (verdict == "note")


@pytest.mark.parametrize(("skew", "verdict"), [(0.5, "ok"), (-3.0, "note"), (40.0, "bad"), (-40.0, "bad")])
def test_a_clock_that_is_off_is_found(skew: float, verdict: str) -> None:
    finding = only(check_clock(skew))
    assert finding.verdict == verdict
    assert (finding.remedy == "") == (verdict == "ok")


def test_the_clock_is_compared_with_the_file_system_of_the_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PRETRAIN_HOME", str(tmp_path / "runs"))
    assert only(check_clock()).verdict == "ok"
    real = time.time
    monkeypatch.setattr(doctor_machine.time, "time", lambda: real() + 60.0)
    assert only(check_clock()).verdict == "bad"
    assert list(tmp_path.iterdir()) == []


def test_a_slow_reverse_look_up_is_found_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "interfaces", lambda: [("eth9", "192.0.2.9")])
    monkeypatch.setattr(doctor_machine, "LONGEST_LOOKUP_S", 1.5)
    monkeypatch.setattr(socket, "gethostbyaddr", lambda address: time.sleep(3.0))
    started = time.monotonic()
    finding = only(check_names())
    assert time.monotonic() - started < 2.9
    assert finding.verdict == "note"
    assert "192.0.2.9 takes" in finding.found


@pytest.mark.parametrize(
    ("found", "environ", "verdict"),
    [
        ([("eth0", "10.0.0.2")], {}, "ok"),
        ([("eth0", "10.0.0.2")], {"NCCL_SOCKET_IFNAME": "eth"}, "ok"),  # NCCL takes beginnings
        ([("eth0", "10.0.0.2")], {"NCCL_SOCKET_IFNAME": "^docker"}, "ok"),
        ([("eth0", "10.0.0.2"), ("ib0", "10.1.0.2")], {}, "note"),
        ([("eth0", "10.0.0.2"), ("ib0", "10.1.0.2")], {"GLOO_SOCKET_IFNAME": "ib0"}, "ok"),
        ([], {}, "note"),
        ([("eth0", "10.0.0.2")], {"GLOO_SOCKET_IFNAME": "eth7"}, "bad"),
    ],
)
def test_the_interface_of_collectives(found: list[tuple[str, str]], environ: dict[str, str], verdict: str) -> None:
    assert only(check_interface(found, environ)).verdict == verdict
    assert all(not address.startswith("127.") for _, address in interfaces())


def test_a_home_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    assert only(check_home(str(tmp_path))).verdict == "ok"
    assert only(check_home(str(tmp_path / "later"))).verdict == "ok"
    assert list(tmp_path.iterdir()) == []
    assert only(check_home("/proc/self")).verdict == "bad"


def test_a_file_where_the_runs_should_be_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "runs"
    place.write_text("a file")
    monkeypatch.setenv("PRETRAIN_HOME", str(place))
    assert only(check_home()).verdict == "bad"
    (runs,) = [finding for finding in check_disks() if finding.check == "runs"]
    assert (runs.verdict, runs.found) == ("bad", f"{place} is not a directory")
    assert only(check_clock()).verdict == "ok"
    monkeypatch.setenv("PRETRAIN_HOME", str(place / "deeper"))
    (runs,) = [finding for finding in check_disks() if finding.check == "runs"]
    assert runs.verdict == "bad"


def test_a_home_that_nobody_can_open_is_a_finding_and_not_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRETRAIN_HOME", "nokind://bucket/runs")
    assert main(["doctor", "--json"]) == 3
    findings = {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["run directory"]["verdict"] == "bad"
    assert "nokind" in findings["run directory"]["found"]
    assert "memory tier" in findings  # the last check


def test_a_driver_that_does_not_answer_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(doctor, "DRIVER_WITHIN_S", 0.5)
    assert only(check_devices()).verdict == "bad"
    tool.write_text("no program")
    assert only(check_devices()).verdict == "bad"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--slots", "-1"], "'-1' is not a whole number from 1 on"),
        (["--slots", "0"], "'0' is not a whole number from 1 on"),
        (["--address", "local"], "--address=local names no cluster"),
        (["--address", ""], "--address= names no cluster"),
    ],
)
def test_what_names_no_slots_and_no_cluster_is_refused(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) if words[0] == "--slots" else nullcontext() as ended:
        assert main(["doctor", *words]) == 2
    assert ended is None or ended.value.code == 2
    assert text in capsys.readouterr().err


def test_the_probe_knows_its_product() -> None:
    import numpy as np

    rows = np.arange(WIDTH)
    left = (7 * rows[:, None] + 3 * rows[None, :]) % 11 - 5
    right = (5 * rows[:, None] + 2 * rows[None, :]) % 13 - 6
    assert int((left @ right).sum()) == expected_sum()


def results(**changes: Any) -> dict[str, dict[str, Any] | None]:
    sound: dict[str, dict[str, Any] | None] = {f"slot {n}": {**SOUND, "reduced": [10]} for n in range(4)}
    for name, change in changes.items():
        entry = sound[name.replace("_", " ")]
        assert entry is not None
        sound[name.replace("_", " ")] = None if change is None else {**entry, **change}
    return sound


@pytest.mark.parametrize(
    ("changes", "check", "verdict", "text"),
    [
        ({}, "slots", "ok", "4 slots agree"),
        ({"slot_2": {"product": expected_sum() + 1}}, "matmul", "bad", "slot 2: a product of whole numbers"),
        ({"slot_1": {"reduced": [9, 10]}}, "all-reduce", "bad", "slot 1: the sum over all slots"),
        ({"slot_3": {"matmul_s": 0.004}}, "matmul", "note", "slot 3 takes 4.0 times as long"),
        ({"slot_0": None}, "all-reduce", "bad", "slot 0 did not answer"),
    ],
)
def test_the_slot_that_is_wrong_slow_or_silent_is_named(
    changes: dict[str, Any], check: str, verdict: str, text: str
) -> None:
    finding = only(judge(results(**changes)))
    assert (finding.check, finding.verdict) == (check, verdict)
    assert text in finding.found


def test_of_real_slots_the_one_that_computes_wrong_and_the_one_that_is_slow_are_found(tmp_path: Path) -> None:
    """Three processes: as it should be; one bit of a factor is wrong; a product takes five times as long."""
    broken, slow = tmp_path / "broken.py", tmp_path / "slow.py"
    broken.write_text(
        "import sys\nfrom launch import slot_probe\nreal = slot_probe._factors\n"
        "def factors():\n    left, right = real()\n    left[5, 7] ^= 4\n    return left, right\n"
        "slot_probe._factors = factors\nsys.exit(slot_probe.main())\n"
    )
    slow.write_text(
        "import sys, time\nimport torch\nfrom launch import slot_probe\nreal = torch.Tensor.__matmul__\n"
        "def throttled(left, right):\n    started = time.perf_counter()\n    product = real(left, right)\n"
        "    time.sleep(4 * (time.perf_counter() - started))\n    return product\n"
        "torch.Tensor.__matmul__ = throttled\nsys.exit(slot_probe.main())\n"
    )
    commands = [PROBE_COMMAND, (sys.executable, str(broken)), (sys.executable, str(slow))]
    findings = check_slots(3, commands=commands, within_s=240.0)
    wrong = [finding for finding in findings if finding.verdict == "bad"]
    assert [finding.found.split(":")[0] for finding in wrong] == ["slot 1"], findings
    (throttled,) = [finding for finding in findings if finding.verdict == "note"]
    assert "slot 2 takes" in throttled.found


def test_a_probe_that_fails_says_why_and_nobody_waits_for_the_others() -> None:
    """The other slot would wait two minutes for it."""
    raising = (sys.executable, "-c", "raise RuntimeError('no kernel image for this device')")
    waiting = (sys.executable, "-c", "import time; time.sleep(100)")
    started = time.monotonic()
    finding = only(check_slots(2, commands=[waiting, raising], within_s=90.0))
    assert time.monotonic() - started < 60.0
    assert finding.found == "the probe of slot 1 ended with 1: RuntimeError: no kernel image for this device"
    silent = only(check_slots(1, commands=[(sys.executable, "-c", "print('no result')")], within_s=90.0))
    assert (silent.check, silent.verdict) == ("all-reduce", "bad")


@pytest.mark.parametrize(("visible", "expected"), [("3,5", ["3", "5"]), (None, ["0", "1"]), ("7", ["7", ""])])
def test_slots_are_devices_that_are_visible_here(
    visible: str | None, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    told = "import os; open(os.environ['RANK'], 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
    monkeypatch.chdir(tmp_path)
    check_slots(2, "cuda", commands=[(sys.executable, "-c", told)] * 2, within_s=60.0)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == expected


def test_the_error_of_a_node_is_what_was_raised_there() -> None:
    from ray.exceptions import GetTimeoutError, RayTaskError

    where = "ray::examine_node() (pid=7, ip=10.0.0.2)\n  line 1\nModuleNotFoundError: No module named 'launch'"
    cause = ModuleNotFoundError("No module named 'launch'")
    assert why(RayTaskError("examine_node", where, cause)) == "ModuleNotFoundError: No module named 'launch'"
    assert why(GetTimeoutError("Get timed out")) == "no answer within 120 s"
    assert why(ValueError("one\ntwo")) == "one"


def node(**changes: Any) -> tuple[float, float, dict[str, Any]]:
    answer = {
        "host": "a", "findings": [], "versions": {"python": "3.11.7", "torch": "2.13.0"}, "t": 100.5,
        "sees_marker": True, "marker": "m",
    }  # fmt: skip
    return 100.0, 101.0, {**answer, **changes}


def test_nodes_that_agree_are_fine() -> None:
    finding = only(compare_nodes({"a": node(), "b": node()}, lambda key: True))
    assert finding.verdict == "ok"


@pytest.mark.parametrize(
    ("changes", "check", "verdict"),
    [
        ({"versions": {"python": "3.11.7", "torch": "2.12.0"}}, "torch of all nodes", "bad"),
        ({"versions": {"python": "3.12.0", "torch": "2.13.0"}}, "python of all nodes", "bad"),
        ({"t": 140.0}, "b clock", "bad"),
        ({"t": 95.0}, "b clock", "note"),
        ({"sees_marker": False}, "b run directory", "bad"),
        ({"marker": ""}, "b run directory", "bad"),
        ({"findings": [Finding("file limit", "bad", "512 open files", "ulimit")]}, "b file limit", "bad"),
        ({"error": "it is gone"}, "b", "bad"),
    ],
)
def test_what_differs_between_nodes_is_named(changes: dict[str, Any], check: str, verdict: str) -> None:
    finding = only(compare_nodes({"a": node(), "b": node(**changes)}, bool))
    assert (finding.check, finding.verdict) == (check, verdict)


@pytest.mark.slow
def test_every_node_and_slot_of_a_cluster_is_examined(tmp_path: Path) -> None:
    """Two nodes on this machine by `pretrain cluster up`, then `doctor --address`."""
    environment = {**os.environ, "TMPDIR": "/tmp", "PRETRAIN_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def pretrain(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "launch.cli", *words]
        env = {**environment, **more}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)

    up = pretrain("cluster", "up", "--nodes", "2")
    try:
        assert up.returncode == 0, up.stderr
        exported = dict(word.split("=", 1) for line in up.stdout.splitlines() for word in line.split()[1:])
        result = pretrain("doctor", "--address", "auto", "--json", **exported)
    finally:
        down = pretrain("cluster", "down")
    assert down.returncode == 0, down.stderr
    findings = {finding["check"]: finding for finding in json.loads(result.stdout)}
    assert findings.get("slots", {}).get("found", "").startswith("2 slots agree"), result.stdout + result.stderr


ASKING = """
import json, time
import ray
from launch import doctor_cluster

doctor_cluster.WITHIN_S = 3.0
ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

@ray.remote(num_cpus=1)
def node(kind):
    if kind == "ill":
        raise OSError("no such disk")
    time.sleep(1000.0 if kind == "silent" else 0.0)
    return {"kind": kind}

ray.get(node.remote("good"))  # the first worker takes seconds
kinds = {"a": "silent", "b": "good", "c": "silent", "d": "ill"}
asked = time.time()
calls = {node.remote(kind): (name, asked) for name, kind in kinds.items()}
found = doctor_cluster._answers(ray, calls)
print(json.dumps([time.time() - asked, [[name, answer] for name, (_, _, answer) in found.items()]]), flush=True)
ray.shutdown()
"""


@pytest.mark.slow  # a Ray of its own
def test_nodes_are_asked_at_once_and_silent_ones_are_waited_for_together(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", ASKING], env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    took_s, answers = json.loads(done.stdout.splitlines()[-1])
    silent = {"error": "no answer within 3 s"}
    assert answers[1][1] == {"kind": "good"}
    assert "no such disk" in answers[3][1]["error"]
    assert [answers[0], answers[2]] == [["a", silent], ["c", silent]]
    assert 3.0 <= took_s < 5.5, "each was waited for by itself"
