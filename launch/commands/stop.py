"""`pretrain stop RUN`: asks a running run to save and end."""

from __future__ import annotations

import argparse


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "stop",
        help="ask a run to save a checkpoint and end",
        description="Asks a run to save a checkpoint and end, and waits until it has. `pretrain resume RUN` goes on.",
    )
    parser.add_argument("run", metavar="RUN", help="name or path of the run")
    parser.add_argument("--now", action="store_true", help="kill the ranks; steps since the last checkpoint are redone")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="longest wait in seconds (default 300)"
    )
    parser.set_defaults(handler="launch.runs:run_stop")
