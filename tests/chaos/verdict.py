"""What is compared after a trial: every step, the weights, the state, and what lies around.

takes → two run directories; gives → a list of problems, empty when the hurt run ended as the untouched one.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from launch.proof import compare_records
from pretrain.checkpoint import list_checkpoints, weights_sha256
from pretrain.checkpoint.files import read_manifest
from pretrain.metrics.history import read_attempts
from pretrain.rundir import RunDirectory
from pretrain.store.base import TEMPORARY


def differences(untouched: RunDirectory, hurt: RunDirectory, steps: int, *, records: bool = True) -> list[str]:
    """What differs between the two runs; equal means the same bits. On object stores a kill loses the last records."""
    attempts = [read_attempts(run.store) for run in (untouched, hurt)]
    compared = compare_records(*attempts, steps) if records else []
    problems = [f"{c.what}: {c.untouched} and {c.killed}" for c in compared if not c.equal]
    newest = [list_checkpoints(run.checkpoints)[0] for run in (untouched, hurt)]
    if newest[1].step != steps or newest[1].problem:
        return [*problems, f"the last checkpoint is {newest[1].name}: {newest[1].problem}"]
    if weights_sha256(untouched.checkpoints, newest[0].name) != weights_sha256(hurt.checkpoints, newest[1].name):
        problems.append("the final weights differ")
    states = [
        read_manifest(run.checkpoints, one.name).training_state
        for run, one in zip((untouched, hurt), newest, strict=True)
    ]
    if states[0] != states[1]:  # rows read, tokens, skipped steps
        problems.append(f"the final states differ: {states}")
    return problems


def leftovers(run: RunDirectory, mark: str, memory: Path) -> list[str]:
    """Processes with the trial's mark in their environment, unfinished files, copies in memory."""
    left = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("PRETRAIN_TRIAL") == mark:
                left.append(f"process {process.pid} {' '.join(process.cmdline())[:80]}")
        except psutil.Error:
            continue
    folder = run.store.local_path("")
    left += [f"file {path}" for path in folder.rglob("*") if path.name.startswith(TEMPORARY)] if folder else []
    left += [f"memory {path}" for path in memory.iterdir()] if memory.exists() else []
    left += [f"{info.name}: {info.problem}" for info in list_checkpoints(run.checkpoints) if info.problem]
    return left
