"""Whole runs of `python -m pretrain` inside rank processes that are already up: several per start."""

from __future__ import annotations

import os

from pretrain.__main__ import main
from pretrain.topology import World


def trainings(world: World, runs: list[list[str]], home: str) -> list[int]:
    """Trains one run after the other in the process group that is up; exit codes."""
    os.environ["PRETRAIN_HOME"] = home
    return [int(main(arguments)) for arguments in runs]
