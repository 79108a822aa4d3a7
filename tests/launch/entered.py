"""A run of fake ranks that the files of `pretrain cluster render` start: its config, and the files themselves."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from tests.launch.runs import ROOT, run_cli, write_config

NAME, STEPS = "entered", 20


def config_for(folder: Path, *, ranks: int, **cluster: Any) -> Path:
    """Two ranks, `ranks` of them on a node; its shells find this interpreter and this code."""
    setup = [f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT}"]
    nodes = {"ranks": ranks, "cpus": ranks, "memory": "1GiB", "home": str(folder / "runs"), "setup": setup}
    nodes |= cluster.pop("nodes", {})
    return write_config(folder, NAME, fake={"steps": STEPS, "step_s": 0.05}, nodes=nodes, **cluster)


def rendered(folder: Path, kind: str, config: Path, *options: str) -> str:
    """What the command prints."""
    done = run_cli(folder, "cluster", "render", kind, str(config), *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def sent_to_the_head(text: str) -> str:
    """The command that a launcher's file tells to send, as the shell hands it to `ray exec`."""
    (line,) = [line for line in text.splitlines() if line.startswith("# Send:")]
    program, exec_, file, command = shlex.split(line.removeprefix("# Send:"))
    assert (program, exec_, file) == ("ray", "exec", "FILE")
    return command
