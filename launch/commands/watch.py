"""`pretrain watch RUN`: a run on the terminal, refreshed in place."""

from __future__ import annotations

import argparse


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "watch",
        help="watch a run on the terminal",
        description="Shows the facts of the run's page in the dashboard until the run ends, refreshed in place, on "
        "four pages: how it stands (curves, where the time goes, data, attention, norms, ranks, checkpoints); what "
        "happened (timeline, attempts, restarts, faults); its config and what attempts changed in it; its logs. A line "
        "per news where there is no terminal. Only reads the run's directory.",
    )
    parser.add_argument("run", metavar="RUN", help="name or path of the run")
    parser.add_argument("--every", type=_seconds, default=1.0, help="seconds between two looks (default 1)")
    parser.add_argument("--once", action="store_true", help="show it once and end")
    parser.set_defaults(handler="launch.monitor.terminal:run_watch")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"--every={text} is out of range. It is 0.1 to 3600 seconds")
    return seconds
