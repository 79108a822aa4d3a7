"""`pretrain doctor`: is this machine fit to train; what dead runs left behind is removed.

Takes nothing → a table of checks of this machine, each with what to do; with `--slots` also of its slots, with
`--address` of every node of a Ray cluster. Versions come from package metadata, so that a broken package is a finding
and not a crash.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import psutil

from launch.clusters.local import remove_leftovers
from launch.doctor_machine import (
    Finding,
    check_clock,
    check_compiler,
    check_file_limits,
    check_home,
    check_interface,
    check_names,
    check_packages,
    check_python,
    check_shared_memory,
)
from launch.doctor_slots import check_slots
from launch.tables import print_rows
from pretrain.errors import ExitCode, PretrainError
from pretrain.rundir import RunDirectory, home_url, list_runs
from pretrain.rundir.memory_folders import DEFAULT_DIRECTORY, memory_folders, remove_orphans

LEAST_DISK_BYTES = 2 * 10**9
LEAST_MEMORY_BYTES = 2 * 10**9
DRIVER_WITHIN_S = 30.0


def run_doctor(args: argparse.Namespace) -> int:
    """Handler of `pretrain doctor`; exit code 3 if something is bad."""
    if args.address is not None:
        from launch.doctor_cluster import check_cluster

        findings = check_cluster(args.address, args.device)
    else:
        findings = [finding for check in CHECKS for finding in check()]
        if args.slots:
            findings += check_slots(args.slots, args.device)
    rows = [asdict(finding) for finding in findings]
    print_rows(["check", "verdict", "found", "remedy"], rows, as_json=args.json)
    return int(ExitCode.FAILED if any(finding.verdict == "bad" for finding in findings) else ExitCode.DONE)


def check_cores() -> list[Finding]:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    busy = load > cores
    remedy = "other work slows training down" if busy else ""
    return [Finding("cores", "note" if busy else "ok", f"{cores}, load {load:.1f}", remedy)]


def check_memory() -> list[Finding]:
    free = psutil.virtual_memory().available
    remedy = "" if free >= LEAST_MEMORY_BYTES else "a rank needs about 1 GB before its model; free some"
    return [Finding("memory", "ok" if not remedy else "note", f"{free / 1e9:.1f} GB free", remedy)]


def check_disks() -> list[Finding]:
    findings = []
    for name, place in (("temporary folder", tempfile.gettempdir()), ("runs", home_url())):
        if "://" in place:
            continue
        existing = Path(place).absolute()
        while not existing.exists():
            existing = existing.parent
        free = shutil.disk_usage(existing).free
        if not existing.is_dir():
            findings.append(Finding(name, "bad", f"{existing} is not a directory", "choose another with PRETRAIN_HOME"))
        elif not os.access(existing, os.W_OK):
            findings.append(Finding(name, "bad", f"{place} cannot be written", "choose another with PRETRAIN_HOME"))
        else:
            remedy = "" if free >= LEAST_DISK_BYTES else "free some space: checkpoints hold 12 bytes per parameter"
            findings.append(Finding(name, "note" if remedy else "ok", f"{free / 1e9:.1f} GB free in {place}", remedy))
    return findings


def check_devices() -> list[Finding]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return [Finding("devices", "ok", "no CUDA device; cluster.device=cpu trains")]
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=DRIVER_WITHIN_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:  # a driver that hangs hangs this program too
        return [
            Finding("devices", "bad", f"nvidia-smi gives no answer: {error}", "look at the driver; restart the node")
        ]
    names = [line for line in listed.stdout.splitlines() if line.startswith("GPU")]
    remedy = "" if names else "nvidia-smi is there but finds no device: look at the driver"
    return [Finding("devices", "ok" if names else "note", f"{len(names)} CUDA devices", remedy)]


def check_loopback() -> list[Finding]:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            return [Finding("loopback", "ok", "127.0.0.1 can be listened on")]
    except OSError as error:
        return [Finding("loopback", "bad", str(error), "ranks and Ray talk over 127.0.0.1: allow it")]


def check_runs() -> list[Finding]:
    try:
        statuses = list_runs()
    except PretrainError as error:
        return [Finding("runs", "bad", str(error))]
    findings = []
    for status in statuses:
        if status.state == "lost":
            found = f"{status.name} died without a word"
            findings.append(Finding("runs", "note", found, f"go on with pretrain resume {status.name}"))
        elif status.state == "damaged":
            findings.append(Finding("runs", "bad", f"{status.name}: {status.reason}"))
    return findings


def check_leftovers() -> list[Finding]:
    removed = remove_leftovers()
    found = ", ".join(str(folder) for folder in removed) or "none"
    return [Finding("leftovers", "note" if removed else "ok", found, "removed" if removed else "")]


def check_memory_tier() -> list[Finding]:
    """Copies of checkpoints in memory: those of runs that are over go, those of others are told of."""
    bases = {DEFAULT_DIRECTORY}
    with contextlib.suppress(PretrainError):
        for status in list_runs():
            with contextlib.suppress(PretrainError):
                bases.add(Path(RunDirectory.locate(f"{home_url()}/{status.name}").config().checkpoint.ram_directory))
    findings = []
    for base in sorted(bases):
        for folder in [*remove_orphans(base), *memory_folders(base)]:
            if folder.orphan:
                findings.append(Finding("memory tier", "note", f"{folder.path}: {folder.orphan}", "removed"))
            else:
                found = f"{folder.path}: {folder.bytes / 1e6:.0f} MB of {folder.run_url or 'an unknown run'}"
                remedy = "given back when that run ends or its directory is gone"
                findings.append(Finding("memory tier", "ok", found, remedy))
    return findings or [Finding("memory tier", "ok", "none")]


CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    check_python,
    check_packages,
    check_compiler,
    check_cores,
    check_memory,
    check_shared_memory,
    check_file_limits,
    check_disks,
    check_home,
    check_clock,
    check_names,
    check_interface,
    check_devices,
    check_loopback,
    check_runs,
    check_leftovers,
    check_memory_tier,
)
