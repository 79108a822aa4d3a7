"""Secrets that a test plants in an environment, and where they turn up: in files and on command lines."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import psutil

PLANTED = {
    "WANDB_API_KEY": "planted-5f2c1d4e-wandb",
    "AWS_SECRET_ACCESS_KEY": "planted-77aa03bb-aws",
    "HF_TOKEN": "planted-e19f4ac0-hf",
}


def files_with(words: Iterable[str], top: Path) -> list[str]:
    """Files below a folder that hold one of the words."""
    found = []
    for folder, _, names in os.walk(top):
        for name in names:
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                data = path.read_bytes()
                found += [f"{path} has {word}" for word in words if word.encode() in data]
    return found


def command_lines_with(words: Iterable[str]) -> list[str]:
    """Processes of this machine with one of the words on their command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        found += [f"{process.pid} has {word}" for word in words if word in line]
    return found
